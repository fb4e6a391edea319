"""mkdocs' hook for the site: pages that are not named in mkdocs.yml, and links that leave docs/.

A link to a file of the repository becomes a link to a copy of it in the site
(``source/<path>.txt``), so that it can be followed wherever the site is, and the
strict build finds it missing where the file is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
#: Where pages that mkdocs.yml does not name are put in the navigation.
REST = "Measured and decided"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name every other page at the end of the navigation, so that none can be forgotten."""
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    pages = sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))
    rest = [page for page in pages if page not in named]
    if rest and config.nav is not None:
        config.nav.append({REST: rest})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a copy of each file of the repository that some page links to."""
    outside = {
        target
        for page in DOCS.rglob("*.md")
        for _, link, _ in _LINK.findall(page.read_text(encoding="utf-8"))
        if (target := _outside(page, link)) is not None
    }
    for target in sorted(outside):
        text = target.read_text(encoding="utf-8")
        files.append(File.generated(config, f"source/{target.relative_to(ROOT)}.txt", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository go to their copies."""
    source = DOCS / page.file.src_uri

    def rewritten(found: re.Match[str]) -> str:
        target = _outside(source, found[2])
        if target is None:
            return found[0]
        copy = DOCS / "source" / f"{target.relative_to(ROOT)}.txt"
        return f"{found[1]}{os.path.relpath(copy, source.parent)})"

    return _LINK.sub(rewritten, markdown)


def _outside(page: Path, link: str) -> Path | None:
    """Give the file of the repository that a link of a page leads to, where it lies outside of docs/."""
    if "://" in link or link.startswith(("/", "mailto:")):
        return None
    target = (page.parent / link).resolve()
    return target if target.is_file() and ROOT in target.parents and DOCS not in target.parents else None

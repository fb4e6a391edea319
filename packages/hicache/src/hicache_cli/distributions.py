"""Which installed distributions own an import package, read from their RECORD files.

``importlib.metadata.packages_distributions`` knows only top_level.txt on Python
3.10, and says "both" for a namespace package that two distributions share
rightly. What does harm is one file that two distributions wrote: the later
installation overwrote the earlier, and uninstalling either breaks the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata


@dataclass(slots=True)
class Owners:
    """The distributions that installed files of one import package."""

    versions: dict[str, str] = field(default_factory=dict)
    """Distribution -> version."""
    contested: dict[str, str] = field(default_factory=dict)
    """Distributions that own a file which another one owns too -> one such file."""


def owners_of(packages: Iterable[str]) -> Mapping[str, Owners]:
    """Find the owners of top-level import packages; one that is not installed, or is editable, has none.

    A distribution that is seen twice on sys.path counts once, as the first.
    """
    wanted = set(packages)
    owners = {package: Owners() for package in wanted}
    first_owner: dict[str, str] = {}
    seen: set[str] = set()
    for distribution in metadata.distributions():
        record = distribution.read_text("RECORD") or ""
        if not any(package in record for package in wanted):
            continue
        name = distribution.metadata["Name"] or "unknown"
        normal = name.lower().replace("_", "-").replace(".", "-")
        if normal in seen:
            continue
        seen.add(normal)
        for path in _paths(record):
            package = path.split("/")[0].split(".")[0]
            if package not in wanted or "__pycache__" in path or ".dist-info/" in path:
                continue
            found = owners[package]
            found.versions[name] = distribution.version
            other = first_owner.setdefault(path, name)
            if other != name:
                found.contested.setdefault(other, path)
                found.contested.setdefault(name, path)
    return owners


def _paths(record: str) -> Iterable[str]:
    for line in record.splitlines():
        path = line.rsplit(",", 2)[0].strip('"')
        if path:
            yield path

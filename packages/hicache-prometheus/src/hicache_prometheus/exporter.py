"""`hicache exporter`: the counts of all processes of a host that write to one folder, and a store's use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import click
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import Metric

from hicache_core.errors import HiCacheError
from hicache_prometheus.families import families
from hicache_prometheus.folder import Folder
from hicache_prometheus.recorder import FOLDER_VARIABLE
from hicache_prometheus.snapshot import Snapshot
from hicache_prometheus.stores import Store


class HostCollector:
    """What the exporter's registry asks at every scrape."""

    def __init__(self, folder: Folder | None, store: Store | None = None) -> None:
        self._folder = folder
        self._store = store

    def describe(self) -> list[Metric]:
        """Nothing is known before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give the families of all processes together, and of the store."""
        snapshot = self._folder.snapshot() if self._folder is not None else Snapshot()
        usages = None
        if self._store is not None:
            usages, identities = self._store.look()
            snapshot.identities |= identities
        return families(snapshot, usages)


def dashboard() -> str:
    """Give the Grafana dashboard, as JSON to import."""
    return (resources.files("hicache_prometheus") / "dashboard.json").read_text(encoding="utf-8")


@click.command()
@click.option(
    "--dir",
    "folder",
    envvar=FOLDER_VARIABLE,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"The folder that {FOLDER_VARIABLE} names for the engines.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=9467, show_default=True, help="0: a free one.")
@click.option("--address", default="127.0.0.1", show_default=True, help="0.0.0.0 for scrapers elsewhere.")
@click.option("--store", metavar="BACKEND", help="Also show what a store holds, opened for reading.")
@click.option(
    "--option", "options", multiple=True, metavar="K=V", help="An option of --store; may be repeated."
)
@click.option("--once", is_flag=True, help="Print the metrics instead, and end.")
@click.option("--dashboard", "wants_dashboard", is_flag=True, help="Print the Grafana dashboard, and end.")
def exporter(
    folder: Path | None, port: int, address: str, once: bool, wants_dashboard: bool, **rest: Any
) -> None:
    """Serve the metrics of every engine process of this host that runs with HICACHE_PROMETHEUS_DIR."""
    if wants_dashboard:
        click.echo(dashboard(), nl=False)
        return
    if folder is None and rest["store"] is None:
        raise click.UsageError(
            f"no folder: set {FOLDER_VARIABLE} for the engines and for this command, or give --dir or --store"
        )
    registry = CollectorRegistry()
    try:
        store = Store(rest["store"], dict(map(_pair, rest["options"]))) if rest["store"] else None
    except HiCacheError as error:
        raise click.ClickException(str(error)) from error
    registry.register(HostCollector(Folder(folder) if folder else None, store))
    if once:
        click.echo(generate_latest(registry), nl=False)
        return
    try:
        server, thread = start_http_server(port, address, registry=registry)
    except OSError as error:
        raise click.ClickException(
            f"{address}:{port} cannot be listened on: {error}; choose another --port"
        ) from error
    click.echo(f"metrics at http://{address}:{server.server_port}/metrics", err=True)
    try:
        thread.join()
    except KeyboardInterrupt:
        server.shutdown()


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not an option (write NAME=VALUE, such as root=/var/cache/kv)")
    return name, value

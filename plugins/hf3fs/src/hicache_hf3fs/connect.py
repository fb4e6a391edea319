"""From options to what a storage works with: metadata, client, and whether the root is on a network."""

from __future__ import annotations

import os

from hicache_core.errors import BackendUnavailable, InvalidOptions
from hicache_core.mounts import file_system_of, is_network
from hicache_core.storage import HiCacheStorageConfig
from hicache_hf3fs.metadata import Hf3fsMetadataInterface, Terms
from hicache_hf3fs.options import Hf3fsOptions
from hicache_hf3fs.page_io import PageMover
from hicache_hf3fs.posix_client import PosixClient


def network_at(options: Hf3fsOptions) -> bool:
    """Make the root and tell whether it lies on a network file system.

    Raises: BackendUnavailable.
    """
    try:
        os.makedirs(options.root, mode=0o700, exist_ok=True)
    except OSError as error:
        raise BackendUnavailable(
            f"the root {options.root!r} cannot be made",
            value=error.strerror or str(error),
            remedy=f"Mount the file system, or give user {os.getuid()} the right to write there.",
        ) from error
    return is_network(options.root) if options.network is None else options.network


def make_client(options: Hf3fsOptions, *, network: bool) -> PageMover:
    """Make the client that the options name.

    Raises: BackendDependencyMissing, BackendUnavailable.
    """
    if options.client == "usrbio":
        from hicache_hf3fs.usrbio_client import UsrbioClient

        client: PageMover = UsrbioClient(options)
        return client
    # Over a network threads wait for servers. Here they copy and hash: beyond the cores they only wait for
    # each other at the file's lock.
    threads = options.numjobs if network else min(options.numjobs, len(os.sched_getaffinity(0)))
    return PosixClient(threads, flush=options.fsync, network=network)


def connect_metadata(
    options: Hf3fsOptions, config: HiCacheStorageConfig, *, deadline: float
) -> Hf3fsMetadataInterface:
    """Open the local metadata, or reach the server.

    Raises: BackendUnavailable, BackendTimeout, BackendIncompatible, InvalidOptions.
    """
    namespace = config.namespace.id
    if options.metadata_url is not None:
        from hicache_hf3fs.metadata_http import MetadataClient

        token = options.metadata_token.get_secret_value() if options.metadata_token else ""
        client = MetadataClient(options.metadata_url, namespace, token=token, retries=options.retries)
        try:
            client.check(deadline=deadline)
        except BaseException:
            client.close()
            raise
        return client
    from hicache_hf3fs.metadata_local import LocalMetadata

    path = options.metadata_path or os.path.join(options.root, "metadata.sqlite")
    _check_local(path)
    return LocalMetadata(path, namespace, Terms(options.lease_s, options.hold_s), deadline=deadline)


def is_local_disk(path: str) -> bool:
    """False where a file would lie on a network: sqlite's locks and memory do not work across hosts."""
    return not is_network(_folder_of(path))


def _folder_of(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder


def _check_local(path: str) -> None:
    if not is_local_disk(path):
        kind = file_system_of(_folder_of(path)) or "an unknown file system"
        complaint = (
            f"the metadata would lie on {kind}; set metadata_path to a local disk, or metadata_url to a "
            "server"
        )
        raise InvalidOptions("hf3fs", [("metadata_path", complaint, "")])

"""Which NIXL plugin serves these options here, why, and with which parameters.

Only the chosen plugin is ever loaded: the choice looks at options, mounts and
pools, and asks NIXL for nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import SecretStr

from hicache_core import HostPool
from hicache_core.errors import InvalidOptions
from hicache_core.mounts import file_system_of
from hicache_nixl.options import NixlOptions

#: What each plugin takes in ``engine``, beyond what our own options set.
#: Source: nixl 1.5.1, get_plugin_params; OBJ declares none, so src/plugins/obj/README.md.
KNOWN_PARAMETERS = {
    "POSIX": {"kernel_queue_size"},
    "GDS": {"batch_pool_size", "batch_limit", "max_request_size"},
    "GDS_MT": {"thread_count"},
    "HF3FS": {"mem_config", "iopool_size"},
    "OBJ": {
        "num_threads",
        "crtMinLimit",
        "throughput_target_gbps",
        "resp_checksum",
        "use_virtual_addressing",
    },
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A plugin and the reason why it was taken."""

    plugin: str
    reason: str


def choose(options: NixlOptions, pools: Iterable[HostPool]) -> Choice:
    """Take the plugin that was asked for, or the first that fits."""
    if options.plugin != "auto":
        return Choice(options.plugin, "it was asked for")
    if options.keeps_objects:
        return Choice("OBJ", "a bucket is set")
    if file_system_of(options.folders[0]) == "hf3fs":
        return Choice("HF3FS", f"{options.folders[0]} is a 3FS mount")
    if any(pool.device != "cpu" for pool in pools):
        return Choice("GDS_MT", "a pool lies on an accelerator")
    return Choice("POSIX", "pages lie in folders and in host memory")


def parameters(plugin: str, options: NixlOptions) -> dict[str, str]:
    """Give what the plugin's backend is created with.

    Raises:
        InvalidOptions: ``engine`` names what the plugin does not know.
    """
    known = KNOWN_PARAMETERS[plugin]
    bad = [name for name in options.engine if name not in known]
    if bad:
        raise InvalidOptions("nixl", [("engine", _unknown(plugin, name, known), "") for name in bad])
    if plugin == "POSIX":
        queue = {"use_uring": "true"} if options.io == "uring" else {"use_aio": "true"}
        return {"ios_pool_size": str(options.in_flight)} | queue | options.engine
    if plugin == "OBJ":
        return _object_parameters(options) | options.engine
    return dict(options.engine)


def _object_parameters(options: NixlOptions) -> dict[str, str]:
    wanted: dict[str, str | None] = {
        "bucket": options.bucket,
        "region": options.region,
        "access_key": _revealed(options.access_key),
        "secret_key": _revealed(options.secret_key),
        "session_token": _revealed(options.session_token),
        "endpoint_override": options.endpoint,
        "scheme": (options.endpoint or "https").partition(":")[0],
        "ca_bundle": options.ca_bundle,
        "use_virtual_addressing": "false",
        "req_checksum": "required",
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _unknown(plugin: str, name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" ({close[0]}?)" if close else f"; it takes: {', '.join(sorted(known))}"
    return f"engine.{name} is unknown to {plugin}{hint}"

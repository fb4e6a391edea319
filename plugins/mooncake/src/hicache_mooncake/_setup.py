"""Setting a native client up: what it is told, by variables and by arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hicache_core.errors import InvalidOptions
from hicache_mooncake._environment import native_environment, variables_of
from hicache_mooncake._native import BACKEND
from hicache_mooncake._preflight import setup_failure
from hicache_mooncake.options import MooncakeOptions

#: Read when bytes first move, and once only; the rest is read at import and in setup().
READ_LATE = "MC_TCP_PROGRESS_TIMEOUT_SEC"
#: The most that the library takes for its queue of buffers a peer.
_TCP_QUEUE = 65_535
_LOG_LEVELS = {"info": "INFO", "warning": "WARNING", "error": "ERROR"}


def variables_for(options: MooncakeOptions, timeout_s: float) -> dict[str, str]:
    """Give the variables under which the library keeps to a deadline.

    A verb asks the master once or twice and moves bytes once: two fifths of the
    deadline for a question, one fifth for a connection on which nothing moves.
    """
    rpc_s = options.rpc_timeout_s or 0.4 * timeout_s
    derived = {
        "MC_RPC_TIMEOUT_MS": str(max(1, round(rpc_s * 1000))),
        # 20 attempts take 90 s on a dead master.
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        # Without it a stopped owner holds a call for 60 s, and its bytes arrive after the call has ended.
        READ_LATE: str(max(1, int(0.2 * timeout_s))),
        "MC_TCP_ENABLE_CONNECTION_POOL": str(int(options.connection_pool)),
        # The defaults, 1,024 buffers a peer and 1 s, fail a batch of 1,000 pages.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(_TCP_QUEUE),
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": str(_TCP_QUEUE),
        "MC_TCP_ADMISSION_TIMEOUT_MS": str(max(1, round(500 * timeout_s))),
        "MC_LOG_LEVEL": _LOG_LEVELS[options.log_level],
    }
    return variables_of(derived, options.extra)


def set_up(module: Any, options: MooncakeOptions, hostname: str, variables: Mapping[str, str]) -> Any:
    """Make a native client and connect it.

    Raises: InvalidOptions (extra), BackendUnavailable.
    """
    native = module.MooncakeDistributedStore()
    with native_environment(variables):
        if options.daemon:
            pool_nbytes = options.segment_size or options.buffer_size
            code = native.setup_dummy(pool_nbytes, options.buffer_size, options.daemon)
        else:
            code = _setup(native, options, hostname)
    if code != 0:
        raise setup_failure(options, code)
    return native


def replication(module: Any, options: MooncakeOptions, native: Any) -> Any:
    """Say how new objects are kept, as the library wants it."""
    config = module.ReplicateConfig()
    config.replica_num = options.replicas
    config.with_hard_pin = options.hard_pin
    if options.soft_pin:
        config.soft_pin_action = module.SoftPinAction.ENABLE
    if options.preferred_segment:
        local = options.preferred_segment == "local"
        config.preferred_segment = native.get_hostname() if local else options.preferred_segment
    return config


def _setup(native: Any, options: MooncakeOptions, hostname: str) -> int:
    extra = {name: value for name, value in options.extra.items() if not name.startswith("MC_")}
    try:
        return int(
            native.setup(
                hostname,
                options.metadata_server,
                options.segment_size,
                options.buffer_size,
                options.protocol,
                options.device,
                options.master,
                tenant_id=options.tenant,
                **extra,
            )
        )
    except TypeError as error:
        complaint = f"extra={sorted(extra)}: setup() of this Mooncake does not take all of these"
        raise InvalidOptions(BACKEND, [("extra", complaint, "")]) from error

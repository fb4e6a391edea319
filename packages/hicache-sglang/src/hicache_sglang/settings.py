"""What an operator sets: the adapter's keys in ``--hicache-storage-backend-extra-config``.

Example, for the ``dynamic`` backend of any release::

    {"backend_name": "file", "module_path": "hicache_sglang", "class_name": "HiCacheSGLang",
     "interface_v1": 1, "options": {"root": "/data/kv", "capacity": "200GiB"}, "tenant": "team-a"}

``backend_name`` is the hicache backend; ``options`` are that backend's own, read
with hicache's usual precedence (here > ``HICACHE_<BACKEND>_<FIELD>`` > file > default).
Keys that SGLang reads itself may stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hicache_core.adapters import AdapterOptions
from hicache_core.errors import InvalidOptions
from hicache_core.options import resolve

#: What the plugin puts before a backend's name, so that SGLang's own names stay as they are.
PREFIX = "hicache."

#: Read by SGLang and left in the extra config by some release; not ours to refuse.
#: Source: SGLang 0.5.5 to 0.5.23, the controllers and ``backend_factory.py``.
SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "file_storage_path",
    }
)


class Settings(AdapterOptions):
    """The adapter's own options; everything else belongs to the backend."""

    cache_salts: bool = Field(
        default=False,
        description="Requests carry cache_salt or extra_key. Releases before 0.5.20 leave both out "
        "of their page hashes; there the adapter refuses to start when this is set.",
    )


def read_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Validate the adapter's part of the extra config.

    Raises:
        InvalidOptions: every unknown or malformed key at once, with close matches.
    """
    given = {name: value for name, value in (extra_config or {}).items() if name not in SGLANG_KEYS}
    return resolve("sglang", Settings, given).options  # type: ignore[return-value]


def backend_named(name: str | None) -> str:
    """Give the hicache backend of a name as SGLang knows it: with or without the prefix.

    Raises:
        InvalidOptions: no name was given.
    """
    backend = (name or "").removeprefix(PREFIX)
    if not backend:
        complaint = 'backend_name is required: the hicache backend, for example "file"'
        raise InvalidOptions("sglang", [("backend_name", complaint, "")])
    return backend

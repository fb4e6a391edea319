"""What an operator sets: the keys of one entry of ``secondary_tiers``.

Example::

    {"type": "hicache", "backend": "file", "tenant": "team-a",
     "options": {"root": "/data/kv", "capacity": "200GiB"}}

``backend`` is the hicache backend; ``options`` are that backend's own, read with
hicache's usual precedence (here > ``HICACHE_<BACKEND>_<FIELD>`` > file > default).
Keys that vLLM reads itself may stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hicache_core.adapters import AdapterOptions
from hicache_core.options import resolve

#: Read by vLLM and left in the entry by some release; not ours to refuse.
#: Source: vLLM 0.24 to 0.33, ``v1/kv_offload/tiering/{factory,spec}.py``.
VLLM_KEYS = frozenset({"type", "module_path", "locality", "backpressure"})

#: What JSON gives. Anything else among the arguments was made by vLLM and not written by an operator.
_PLAIN = (str, int, float, bool, list, dict)


class Settings(AdapterOptions):
    """The adapter's own options; everything else belongs to the backend."""

    backend: str = Field(min_length=1, description='The hicache backend, for example "file".')
    load_threads: int = Field(default=2, ge=1, le=64, description="Threads that read pages.")
    store_threads: int = Field(default=2, ge=1, le=64, description="Threads that write pages.")


def read_settings(entry: Mapping[str, Any]) -> Settings:
    """Validate the adapter's part of a tier's entry; what a newer vLLM passes besides is left alone.

    Raises:
        InvalidOptions: every unknown or malformed key at once, with close matches.
    """
    given = {name: value for name, value in entry.items() if name not in VLLM_KEYS}
    known = {
        name: value
        for name, value in given.items()
        if name in Settings.model_fields or isinstance(value, _PLAIN)
    }
    return resolve("vllm", Settings, known).options  # type: ignore[return-value]

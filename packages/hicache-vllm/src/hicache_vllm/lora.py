"""LoRA adapters in vLLM's page hashes, by content.

vLLM hashes an adapter's name (0.24, 0.28), or name and path (0.31 on), into the
page hash. Neither says what the adapter computes: a name points elsewhere in another
server, a path is written anew by the next training run, and stored pages outlive
both. A tier cannot tell which pages are an adapter's, so the place that names the
adapter is made to name its content.

Files that change under a loaded adapter leave it unknown which of the two contents
computes; from then on its pages are hashed with a secret of this process, so that
nobody ever finds them. The same where the files cannot be read.

Source: vLLM 0.24 to 0.33, ``v1/core/kv_cache_utils.py`` (_gen_lora_extra_hash_keys).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from typing import Any

from hicache_core.fingerprint import Stamp, stamp_of, weights_digest

_log = logging.getLogger("hicache")

MODULE = "vllm.v1.core.kv_cache_utils"
FUNCTION = "_gen_lora_extra_hash_keys"

_MARK = "_hicache_by_content"


class Adapters:
    """What each adapter of this process is; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str, str], tuple[Stamp | None, str]] = {}

    def digest(self, request: Any) -> str:
        """Give the content of a LoRARequest's adapter as text that no other content shares."""
        path = str(request.lora_path)
        key = (int(request.lora_int_id), str(request.lora_name), path)
        stamp = stamp_of(path)
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = (stamp, self._read(key, stamp))
            elif known[0] != stamp:
                reason = "its files changed while it was loaded"
                known = self._known[key] = (stamp, self._unknown(key, reason))
            return known[1]

    def _read(self, key: tuple[int, str, str], stamp: Stamp | None) -> str:
        digest = weights_digest(key[2]) if stamp is not None else None
        if digest is None or stamp_of(key[2]) != stamp:
            return self._unknown(key, "its files cannot be read")
        return digest

    def _unknown(self, key: tuple[int, str, str], reason: str) -> str:
        _log.warning("hicache: pages of LoRA adapter %r at %r are not shared: %s", key[1], key[2], reason)
        return f"secret:{os.urandom(16).hex()}"


_adapters = Adapters()


def hash_by_content() -> bool:
    """Have this process hash adapters by content; False where this vLLM hashes them in another way."""
    module = sys.modules.get(MODULE)
    original = getattr(module, FUNCTION, None)
    if original is None:
        return False
    if getattr(original, _MARK, False):
        return True

    @functools.wraps(original)
    def extra_keys(request: Any) -> list[Any]:
        keys = original(request)
        return with_content(keys, _adapters.digest(request.lora_request)) if keys else keys

    setattr(extra_keys, _MARK, True)
    setattr(module, FUNCTION, extra_keys)
    return True


def with_content(keys: list[Any], digest: str) -> list[Any]:
    """Put the content in the path's place, or behind the name where there is no path."""
    first = keys[0]
    if isinstance(first, tuple):
        return [(*first[:2], digest), *keys[1:]]
    return [first, digest, *keys[1:]]

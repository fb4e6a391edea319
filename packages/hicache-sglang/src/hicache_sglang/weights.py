"""The weights that the stored pages belong to, while they change under a running server.

From the moment weights are replaced until the host cache is flushed the pages in
memory are of the old ones: the storage neither takes nor gives. After the flush it
is bound to the new weights' namespace if they came from a path, and stays off,
with one log line, if their content is not known (tensors, a failed update).
"""

from __future__ import annotations

import logging
import threading

from hicache_core import HiCache, Identity
from hicache_core.fingerprint import weights_digest
from hicache_sglang.fingerprint import adapter_paths
from hicache_sglang.identity import Server

_log = logging.getLogger("hicache")

_REATTACH = "detach and attach the storage once the server runs weights from a path"


class Weights:
    """What is loaded now, and whether storage may be used; told by watch.py on the scheduler's thread."""

    def __init__(self, server: Server, *, kv_dtype: str, page_tokens: int) -> None:
        self._server = server
        self._kv_dtype = kv_dtype
        self._page_tokens = page_tokens
        self._cache: HiCache | None = None
        self._model_path: str | None = None
        self._adapters = adapter_paths(server.argument("lora_paths"))
        self._digests = {name: weights_digest(path) for name, path in self._adapters.items()}
        self._lock = threading.Lock()
        #: Why storage is not used now; empty while it is. Read without a lock by every call.
        self.off = ""
        self._waits_for_flush = False

    def identity(self) -> Identity:
        """Describe what is loaded now.

        Raises:
            LookupError: an adapter whose content cannot be read.
        """
        return self._server.identity(
            kv_dtype=self._kv_dtype,
            page_tokens=self._page_tokens,
            model_path=self._model_path,
            adapters=self._adapters,
        )

    def serve(self, cache: HiCache) -> None:
        """Bind this cache anew whenever the identity changes."""
        self._cache = cache

    # Told by watch.py.

    def weights_changing(self) -> None:
        """Stop at once: what is computed from here on is of neither set of weights."""
        with self._lock:
            if not self.off:
                self.off = "the weights are being replaced"
            self._waits_for_flush = True

    def weights_changed(self, model_path: str | None) -> None:
        """Remember where the new weights came from; the flush that follows makes them usable."""
        with self._lock:
            if model_path is None:
                self._stay_off("the weights were replaced by some whose content is not known")
            else:
                self._model_path = model_path

    def adapter_loaded(self, name: str, path: str | None) -> None:
        """Bind to the larger set of adapters; a known name with other content waits for a flush."""
        with self._lock:
            digest = weights_digest(path) if path is not None else None
            if not self._server.seeded:
                self._stay_off("LoRA was loaded, and this SGLang leaves it out of its page hashes")
            elif path is None or digest is None:
                self._stay_off(f"the content of LoRA adapter {name!r} is not known")
            elif self._digests.get(name) != digest:
                if name in self._digests:
                    self.off = self.off or f"LoRA adapter {name!r} was replaced"
                    self._waits_for_flush = True
                self._adapters[name], self._digests[name] = path, digest
                if not self._waits_for_flush:
                    self._rebind()

    def cache_flushed(self) -> None:
        """Serve the new weights, if it is known what they are."""
        with self._lock:
            if not self._waits_for_flush:
                return
            self._waits_for_flush = False
            if self._rebind():
                self.off = ""

    def _rebind(self) -> bool:
        if self.off.startswith("for good: "):
            return False
        try:
            identity = self.identity()
        except LookupError as error:
            self._stay_off(str(error))
            return False
        if self._cache is not None:
            self._cache.rebind(identity)
            _log.info("hicache: bound to namespace %s", self._cache.namespace)
        return True

    def _stay_off(self, reason: str) -> None:
        if not self.off.startswith("for good: "):
            _log.warning("hicache: storage is off: %s; %s", reason, _REATTACH)
        self.off = f"for good: {reason}"

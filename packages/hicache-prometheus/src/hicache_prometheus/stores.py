"""What a store holds, asked by the exporter itself: it opens the store as one who only reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from hicache_core.errors import HiCacheError
from hicache_core.factory import StorageBackendFactory
from hicache_core.identity import Identity, Namespace, Placement
from hicache_core.notices import Notices
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage
from hicache_prometheus.cells import Labels
from hicache_prometheus.snapshot import IDENTITY_FIELDS

#: Seconds for which an answer is good enough; listing a large store takes a while.
EVERY_S = 15.0
#: Seconds that a scrape waits for a fresh answer; it gives the older one otherwise.
PATIENCE_S = 1.0
#: Seconds that a call to the store may take.
TIMEOUT_S = 30.0

#: The option with which a backend opens a store and leaves it as it is, whatever the backend.
_READ_ONLY = "read_only"
_READING: Mapping[str, Any] = {_READ_ONLY: True, "capacity": None}

Answer = tuple[dict[Labels, Usage], dict[str, Labels]]


class Store:
    """One store, opened anew for each look, so that one that was away is found again; thread-safe."""

    def __init__(self, backend: str, options: Mapping[str, Any]) -> None:
        """Load the backend and check its options.

        Raises:
            BackendLoadError: any of its kinds.
        """
        loaded = StorageBackendFactory.load(backend, options)
        fields = type(loaded.options).model_fields
        # A reader sets no limit, whatever the environment says of one for the engines.
        reading = {name: value for name, value in _READING.items() if name in fields}
        if _READ_ONLY in reading:
            loaded = StorageBackendFactory.load(backend, {**reading, **options})
        self._loaded = loaded
        self._notices = Notices()
        self._lock = threading.Lock()
        self._answer: Answer = ({}, {})
        self._asked = float("-inf")
        self._asking: threading.Thread | None = None

    def look(self) -> Answer:
        """Give what each namespace holds and what it is; empty while the store cannot be reached."""
        with self._lock:
            busy = self._asking is not None and self._asking.is_alive()
            if not busy and time.monotonic() - self._asked >= EVERY_S:
                self._asked = time.monotonic()
                self._asking = threading.Thread(target=self._ask, name="hicache-store", daemon=True)
                self._asking.start()
            asking = self._asking
        if asking is not None:
            asking.join(PATIENCE_S)
        return self._answer

    def _ask(self) -> None:
        identity = Identity.for_tests(engine="hicache-exporter", model="none", kv_dtype="none", page_tokens=1)
        config = HiCacheStorageConfig(
            namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=TIMEOUT_S
        )
        storage = self._loaded.create(config)
        try:
            storage.open()
            self._answer = self._answered(storage)
        except HiCacheError as error:
            self._answer = ({}, {})
            self._notices.warn(f"hicache exporter: '{self._loaded.spec.name}'", "store", str(error))
        finally:
            storage.close()

    def _answered(self, storage: HiCacheStorage) -> Answer:
        whole = storage.usage()
        name = self._loaded.spec.name
        usages: dict[Labels, Usage] = {(name, ""): Usage(0, 0, whole.store_bytes, whole.capacity)}
        identities: dict[str, Labels] = {}
        for use in storage.namespaces() if storage.capabilities.listing else ():
            usages[(name, use.id)] = Usage(use.pages, use.bytes, whole.store_bytes, whole.capacity)
            manifest = use.manifest or {}
            texts = ("" if manifest.get(field) is None else str(manifest[field]) for field in IDENTITY_FIELDS)
            identities[use.id] = tuple(texts)
        return usages, identities

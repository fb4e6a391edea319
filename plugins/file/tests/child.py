"""A second process for the tests: ``python child.py VERB ROOT [key=value ...]``.

write    sets batch after batch, and says so after each, until it is killed
read     gets what the writers of the same label have set, until its input ends
clear    clears once
"""

from __future__ import annotations

import hashlib
import sys

from hicache_core import Component, HiCacheStorageConfig, HostPool, Identity, Namespace, Placement, Status
from hicache_core.factory import StorageBackendFactory

NBYTES = 16384


def page(key: str, nbytes: int = NBYTES) -> bytes:
    """Give the one content that a key may have."""
    return hashlib.shake_128(key.encode()).digest(nbytes)


def component(nbytes: int = NBYTES) -> Component:
    return Component("kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=nbytes)


def keys_of(label: str, batch: int, count: int, nbytes: int = NBYTES) -> list[str]:
    return component(nbytes).keys([f"{label}-{batch}-{i}" for i in range(count)])


class Store:
    """One storage and a pool of slots to move pages through."""

    def __init__(
        self, root: str, *, tenant: str = "a", nbytes: int = NBYTES, slots: int = 64, **options: object
    ) -> None:
        self.nbytes = nbytes
        self.component = component(nbytes)
        self.buffer = bytearray(nbytes * slots)
        self.pool = HostPool.from_buffer(self.buffer, self.component)
        identity = Identity.for_tests(tenant=tenant)
        self.namespace = Namespace.of(identity)
        timeout_s = float(str(options.pop("timeout_s", 30.0)))
        config = HiCacheStorageConfig(
            namespace=self.namespace, identity=identity, placement=Placement(), timeout_s=timeout_s
        )
        self.storage = StorageBackendFactory.create_backend("file", config, self.pool, root=root, **options)

    def set(self, keys: list[str]) -> list[Status]:
        for i, key in enumerate(keys):
            self.buffer[i * self.nbytes : (i + 1) * self.nbytes] = page(key, self.nbytes)
        return self.storage.batch_set(keys, self.pool.pages(range(len(keys))))

    def get(self, keys: list[str]) -> list[Status]:
        """Get pages; an OK that holds other bytes than the key's is an error."""
        self.buffer[: len(keys) * self.nbytes] = b"\xa5" * (len(keys) * self.nbytes)
        statuses = self.storage.batch_get(keys, self.pool.pages(range(len(keys))))
        for i, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            found = self.buffer[i * self.nbytes : (i + 1) * self.nbytes]
            if status is Status.OK and found != page(key, self.nbytes):
                raise AssertionError(f"wrong bytes under {key}")
        return statuses

    def contains(self, keys: list[str]) -> list[Status]:
        return self.storage.batch_contains(keys)

    def close(self) -> None:
        self.storage.close()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    verb, root, *pairs = sys.argv[1:]
    given = dict(pair.split("=", 1) for pair in pairs)
    label, count = given.pop("label", "w"), int(given.pop("count", "16"))
    batches = int(given.pop("batches", "0"))
    tenant, nbytes = given.pop("tenant", "a"), int(given.pop("nbytes", NBYTES))
    store = Store(root, tenant=tenant, nbytes=nbytes, slots=count, **given)
    say("open")
    number = 0
    if verb == "write":
        while not batches or number < batches:
            statuses = store.set(keys_of(label, number, count, nbytes))
            say(f"{number} {','.join(s.name for s in statuses)}")
            number += 1
    elif verb == "read":
        for line in sys.stdin:
            number = int(line)
            statuses = store.get(keys_of(label, number, count, nbytes))
            say(",".join(s.name for s in statuses))
    elif verb == "clear":
        say(str(store.storage.clear()))
    store.close()


if __name__ == "__main__":
    main()

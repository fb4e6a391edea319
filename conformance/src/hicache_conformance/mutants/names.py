"""Mutants that share what is not the same, or part what is (C9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.memory.store import Store
from hicache_conformance.mutants.registry import breaks
from hicache_core import HiCacheStorageConfig, Identity, Namespace, Pages, Status


class _Renamed(MemoryStorage):
    """A storage that makes its own namespace out of an identity that it changes."""

    def __init__(self, config: HiCacheStorageConfig, options: object) -> None:
        super().__init__(config, options)  # type: ignore[arg-type]
        self._namespace = Namespace.of(self._seen(config.identity)).id

    def _seen(self, identity: Identity) -> Identity:
        raise NotImplementedError


@breaks("C9", "identity")
class KeyWithoutDtype(_Renamed):
    """Pages of one dtype are read as another.

    Seen: AIBrix's L2 namespace, Mooncake's keys (sglang#38362).
    """

    def _seen(self, identity: Identity) -> Identity:
        return dataclasses.replace(identity, kv_dtype="any")


@breaks("C9", "identity")
class KeyWithoutWeights(_Renamed):
    """New weights are served the old weights' pages.

    Seen: SGLang's L3 after update_weights (sglang#24758).
    """

    def _seen(self, identity: Identity) -> Identity:
        return dataclasses.replace(identity, weights=None)


@breaks("C9", "identity")
class KeyWithoutLora(_Renamed):
    """Two adapters share pages.

    Seen: SGLang up to 0.5.9, whose hashes have no seed.
    """

    def _seen(self, identity: Identity) -> Identity:
        return dataclasses.replace(identity, lora=None)


@breaks("C9", "identity")
class SlashesBecomeDashes(_Renamed):
    """``a/b`` and ``a-b`` are one model.

    Seen: SGLang's file and Mooncake backends clean the name.
    """

    def _seen(self, identity: Identity) -> Identity:
        return dataclasses.replace(identity, model=identity.model.replace("/", "-"))


@breaks("C9", "identity")
class TagsRunTogether(_Renamed):
    """``a`` + ``b_c`` equals ``a_b`` + ``c``.

    Seen: SGLang's Mooncake, a suffix joined with underscores.
    """

    def _seen(self, identity: Identity) -> Identity:
        joined = "_".join([identity.model, identity.revision or ""])
        return dataclasses.replace(identity, model=joined, revision=None)


@breaks("C9", "identity")
class PlacementInTheKey(MemoryStorage):
    """Each rank has pages of its own although the shard is the same.

    Seen: rank and size in every suffix.
    """

    def __init__(self, config: HiCacheStorageConfig, options: object) -> None:
        super().__init__(config, options)  # type: ignore[arg-type]
        tenant = f"{config.identity.tenant} of rank {config.placement.tp_rank} on {config.placement.device}"
        self._namespace = Namespace.of(dataclasses.replace(config.identity, tenant=tenant)).id


@breaks("C9", "identity")
class KeysFoldCase(MemoryStorage):
    """Keys that differ in case are one.

    Seen: file systems and tables that fold case.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return super().batch_set([key.lower() for key in keys], locs)

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return super().batch_get([key.lower() for key in keys], locs)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return super().batch_contains([key.lower() for key in keys])


@breaks("C9", "identity")
class KeysAreCut(MemoryStorage):
    """Long keys are cut.

    Seen: LMCache's lm:// fails beyond 150 characters, in the background.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return super().batch_set([key[:100] for key in keys], locs)

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return super().batch_get([key[:100] for key in keys], locs)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return super().batch_contains([key[:100] for key in keys])


@breaks("C9", "identity")
class ComponentsAreOne(MemoryStorage):
    """The component is left out of the key.

    Seen: sidecar pools under the KV pool's keys.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return super().batch_set([key.partition(".")[0] for key in keys], locs)

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return super().batch_get([key.partition(".")[0] for key in keys], locs)


@breaks("C9", "identity")
class ClearWipesOthers(Store):
    """clear removes every namespace.

    Seen: SGLang's Mooncake and file backends, NIXL on files.
    """

    def clear(self, namespace: str) -> int:
        mine = super().clear(namespace)
        for other in {name[0] for name in self._entries}:
            super().clear(other)
        return mine


@breaks("C9", "core", "identity")
class ClearDoesNothing(MemoryStorage):
    """clear returns and nothing is gone.

    Seen: SGLang's EIC and NIXL on OBJ; LMCache empties L1 only.
    """

    def clear(self) -> int:
        return self.usage().pages


@breaks("C9", "core", "shared", "threads")
class ClearLeavesWhatIsInUse(Store):
    """Pages read a moment ago survive a clear.

    Seen: Mooncake without force leaves leased keys (sglang#40409).
    """

    def clear(self, namespace: str) -> int:
        with self._lock:
            doomed = [name for name in self._entries if name[0] == namespace]
            return sum(self._drop(name) for name in doomed[:-1])


@breaks("C9", "identity")
class RemoveIgnoresTheNamespace(Store):
    """remove takes everybody's page of that key.

    Seen: SGLang's EIC, whose delete passes no namespace.
    """

    def remove(self, namespace: str, keys: Sequence[str]) -> list[Status]:
        statuses = super().remove(namespace, keys)
        with self._lock:
            for name in [name for name in self._entries if name[1] in set(keys)]:
                self._drop(name)
        return statuses


@breaks("C9", "identity")
class UsageCountsEverybody(Store):
    """usage counts the whole store.

    Seen: backends that report the server's total as their own.
    """

    def usage(self, namespace: str):  # type: ignore[no-untyped-def]
        usage = super().usage(namespace)
        return dataclasses.replace(usage, pages=len(self._entries), bytes=usage.store_bytes)

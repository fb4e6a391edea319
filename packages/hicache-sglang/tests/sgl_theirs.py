"""A storage that somebody else wrote for SGLang's dynamic loading; hicache must not disturb it."""

from __future__ import annotations

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

STORE: dict = {}


class TheirStore(HiCacheStorage):
    def __init__(self, storage_config, kwargs):
        self.model = storage_config.model_name

    def get(self, key, target_location=None, target_sizes=None):
        page = STORE.get((self.model, key))
        return None if page is None else target_location.copy_(page)

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        return [self.get(key, tensor) for key, tensor in zip(keys, target_locations, strict=True)]

    def set(self, key, value=None, target_location=None, target_sizes=None):
        STORE[self.model, key] = value.clone()
        return True

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        return all(map(self.set, keys, values))

    def exists(self, key):
        return (self.model, key) in STORE

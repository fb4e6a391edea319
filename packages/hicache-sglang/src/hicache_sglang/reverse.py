"""The other way round: a class written for SGLang's interface, driven as a hicache backend.

``hicache check --sglang-class module:Class`` proves such a class against the
contract, through the calls that SGLang makes: ``-o calls=generic``, ``v1`` or
``v2``. What the class cannot express stays as coarse as it is: a batch write that
says False is ERROR for each page, a page that is not given back is a MISS, and an
exception goes through, for it is a finding. Nothing is softened on its behalf.

The class is constructed with the HiCacheStorageConfig of the installed SGLang;
the model's name is the namespace, as in SGLang the only thing that tells models
apart. ``-o extra_config={"file_storage_path": "{tmp}"}`` reaches the class with
``{tmp}`` replaced by an empty folder of the run's own. Keys are digests of 64 hex
digits, as SGLang's are, and a call moves at most 128 pages, as SGLang's do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
from pydantic import Field, field_validator

from hicache_conformance.harness import BaseHarness
from hicache_conformance.subject import Subject
from hicache_core import (
    BackendSpec,
    Capabilities,
    Component,
    HiCacheError,
    HiCacheStorage,
    HiCacheStorageConfig,
    HostPool,
    InvalidArgument,
    Pages,
    Status,
    Usage,
)
from hicache_core.options import Options, resolve
from hicache_sglang.reverse_instances import Instances
from hicache_sglang.reverse_pool import Layout, PoolOfOurs

OK, MISS, ERROR = Status.OK, Status.MISS, Status.ERROR

#: SGLang moves at most so many pages a call (its STORAGE_BATCH_SIZE).
BATCH = 128
#: What the first instance has before a pool is added, for SGLang never asks one without.
_OWN = Component("kv", shard="whole", byte_order="page_first", format="u8", page_nbytes=4096)

SPEC = BackendSpec(
    name="sglang_class",
    api=1,
    target="hicache_sglang.reverse:SGLangClass",
    options="hicache_sglang.reverse:ReverseOptions",
    harness="hicache_sglang.reverse:ReverseHarness",
    summary="a class written for SGLang's interface",
    # What such classes mostly mean to be; the options take it back.
    capabilities=Capabilities(shared=True, persistent=True, durable=True, clear=True, deadline="none"),
)


class ReverseOptions(Options):
    """How to construct the class, and what to hold it to."""

    target: str = Field(default="", description="The class, as module:Class.")
    calls: Literal["generic", "v1", "v2"] = Field(
        default="generic", description="Through which of SGLang's calls."
    )
    layout: Layout = Field(
        default="page_first",
        description="Of the host pools; those whose pages are not K and V are layer_first in any case.",
    )
    extra_config: dict[str, Any] = Field(
        default_factory=dict, description="The class's own options, as SGLang's."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="What its constructor takes beside the config, by name."
    )
    ledger: str = Field(default="", description="A file for the keys that were set; the harness gives one.")
    shared: bool = Field(default=True, description="Hold it to what other processes see.")
    persistent: bool = Field(default=True, description="Hold it to what is there after a restart.")
    durable: bool = Field(default=True, description="Hold it to what is there after kill -9.")
    clear: bool = Field(default=True, description="Hold it to clear() of its own model and nothing else.")

    @field_validator("extra_config", "arguments", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        import json

        return json.loads(value) if isinstance(value, str) else value


def subject(target: str) -> Subject:
    """Make the subject that ``--sglang-class module:Class`` names."""

    def create(config: HiCacheStorageConfig, options: Mapping[str, Any]) -> HiCacheStorage:
        return SGLangClass(config, resolve(SPEC.name, ReverseOptions, {"target": target, **options}).options)

    distribution = next(iter(_distributions_of(target)), "")
    return Subject(
        name=target.partition(":")[2] or target,
        spec=SPEC,
        create=create,
        harness=ReverseHarness,
        reference=f"sglang-class={target}",
        distribution=distribution,
    )


class ReverseHarness(BaseHarness):
    """An empty folder for the class's files; other processes open the same one."""

    faults = frozenset({"second_process"})

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._folder = ""

    def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="hicache-sglang-")
        os.mkdir(f"{self._folder}/store")

    def stop(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def options(self) -> dict[str, Any]:
        folder = f"{self._folder}/store"
        given = {
            name: value.replace("{tmp}", folder) if isinstance(value, str) else value
            for name, value in self.given.items()
        }
        return given | {"ledger": f"{self._folder}/ledger"}


class SGLangClass(HiCacheStorage):
    """A HiCacheStorage of ours over one of SGLang's; an instance of theirs a pool, as they know one."""

    spec = SPEC

    def __init__(self, config: HiCacheStorageConfig, options: Options) -> None:
        super().__init__(config, options)
        self._theirs = Instances(self.spec.name, self._construct)

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        self._load()
        declared = {
            name: getattr(self.options, name) for name in ("shared", "persistent", "durable", "clear")
        }
        self.capabilities = dataclasses.replace(
            self.capabilities,
            **{name: getattr(self.capabilities, name) and kept for name, kept in declared.items()},
        )
        self._ledger = Ledger(self.options.ledger, str(self.config.namespace))
        try:
            own = HostPool.from_buffer(bytearray(_OWN.page_nbytes), _OWN)
            for pool in (own, *pools):
                self._theirs.make(pool)
            self._theirs.drop(own)
        except BaseException:
            self._theirs.close()
            raise
        super().open(pools)

    def add_pool(self, pool: HostPool) -> None:
        super().add_pool(pool)
        self._theirs.make(pool)

    def drop_pool(self, pool: HostPool) -> None:
        super().drop_pool(pool)
        self._theirs.drop(pool)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate, self._theirs.asked() as theirs:
            return [OK if theirs.exists(self._key(key)) else MISS for key in keys]

    def batch_exists(self, keys: Sequence[str]) -> int:
        with self._gate:
            if not keys:
                return 0
            with self._theirs.asked() as theirs:
                return int(theirs.batch_exists([self._key(key) for key in keys]) or 0)

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            return self._in_batches("get", keys, locs)

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            if keys:
                self._ledger.note([self._key(key) for key in keys], locs.nbytes)
            return self._in_batches("set", keys, locs)

    def clear(self) -> int:
        if not self.capabilities.clear:
            return super().clear()
        with self._gate:
            before = len(self._there())
            with self._theirs.asked() as theirs:
                theirs.clear()
            return max(0, before - len(self._there()))  # others may have set some meanwhile

    def usage(self) -> Usage:
        """Count what was ever set and is still there: SGLang's interface has no call for it."""
        with self._gate:
            there = self._there()
            return Usage(len(there), sum(there.values()), sum(there.values()), None)

    def close(self) -> None:
        super().close()
        self._theirs.close()

    # Their calls.

    def _in_batches(self, verb: str, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses: list[Status] = []
        for start in range(0, len(keys), BATCH):
            some, slots = keys[start : start + BATCH], locs[start : start + BATCH]
            if self.options.calls != "generic" and locs.pool is not None:
                statuses += self._moved(verb, locs.pool, some, slots)
            elif verb == "get":
                statuses += self._get_generic(some, slots)
            else:
                statuses += self._set_generic(some, slots)
        return statuses

    def _get_generic(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        tensors = [torch.empty(locs.nbytes, dtype=torch.uint8) for _ in keys]
        with self._theirs.asked() as theirs:
            pages = theirs.batch_get([self._key(key) for key in keys], tensors)
        pages = list(pages or [])[: len(keys)]
        return [self._landed(page, locs, i) for i, page in enumerate(pages)] + [ERROR] * (
            len(keys) - len(pages)
        )

    def _landed(self, page: Any, locs: Pages, position: int) -> Status:
        if page is None:
            return MISS
        raw = page.contiguous().reshape(-1).view(torch.uint8).numpy()
        if raw.nbytes != locs.nbytes:
            return Status.SIZE_MISMATCH
        start = 0
        for view in locs.views(position):
            view[:] = raw[start : start + view.nbytes].data
            start += view.nbytes
        return OK

    def _set_generic(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        tensors = [
            torch.frombuffer(bytearray(b"".join(locs.views(i))), dtype=torch.uint8) for i in range(len(keys))
        ]
        with self._theirs.asked() as theirs:
            stored = theirs.batch_set([self._key(key) for key in keys], tensors)
        return [OK if stored else ERROR] * len(keys)

    def _moved(self, verb: str, pool: HostPool, keys: Sequence[str], locs: Pages) -> list[Status]:
        """Move pages in place, through the v1 or v2 calls; a host index is a page's number."""
        theirs_keys = [self._key(key) for key in keys]
        at = torch.tensor(locs.indices, dtype=torch.int64)
        with self._theirs.of(pool) as theirs:
            if self.options.calls == "v1":
                answers = getattr(theirs, f"batch_{verb}_v1")(theirs_keys, at)
            else:
                transfer = self._interface.PoolTransfer(
                    name=self._interface.PoolName.KV, host_indices=at, keys=theirs_keys
                )
                answers = next(iter(getattr(theirs, f"batch_{verb}_v2")([transfer]).values()), [])
        otherwise = MISS if verb == "get" else ERROR
        found = [OK if answer else otherwise for answer in list(answers or [])[: len(keys)]]
        return found + [ERROR] * (len(keys) - len(found))

    def _there(self) -> dict[str, int]:
        with self._theirs.asked() as theirs:
            return {key: nbytes for key, nbytes in self._ledger.read().items() if theirs.exists(key)}

    def _key(self, key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    # Making theirs.

    def _load(self) -> None:
        module_name, _, class_name = self.options.target.partition(":")
        try:
            self._interface: Any = import_module("sglang.srt.mem_cache.hicache_storage")
            self._class: Callable[..., Any] = getattr(import_module(module_name), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise HiCacheError(
                f"'{self.options.target}' cannot be loaded",
                value=f"{type(error).__name__}: {error}",
                remedy="Write module:Class; install SGLang and the class's own requirements beside hicache.",
            ) from error

    def _construct(self, pool: HostPool) -> Any:
        """Construct one of theirs as SGLang's factory does, and register a pool of our memory with it."""
        values = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
            "model_name": str(self.config.namespace), "extra_config": dict(self.options.extra_config),
        }  # fmt: skip
        fields = {field.name for field in dataclasses.fields(self._interface.HiCacheStorageConfig)}
        config = self._interface.HiCacheStorageConfig(**{k: v for k, v in values.items() if k in fields})
        theirs = self._class(config, *self._second_argument(), **self.options.arguments)
        host_pool = PoolOfOurs(pool, self.options.layout)
        theirs.register_mem_pool_host(host_pool)
        if hasattr(theirs, "register_mem_host_pool_v2"):
            theirs.register_mem_host_pool_v2(host_pool, self._interface.PoolName.KV)
        return theirs

    def _second_argument(self) -> tuple[dict[str, Any], ...]:
        """SGLang gives its own classes the config alone, and dynamic ones an empty dict beside it."""
        inside = self.options.target.startswith("sglang.")
        return () if inside else ({},)


class Ledger:
    """Which keys were ever set in a namespace, by any process: one line a key, appended whole."""

    def __init__(self, path: str, namespace: str) -> None:
        self._path = path
        self._namespace = namespace
        self._own: dict[str, int] = {}

    def note(self, keys: Sequence[str], nbytes: int) -> None:
        """Remember keys before they are set."""
        self._own.update(dict.fromkeys(keys, nbytes))
        if self._path:
            text = "".join(f"{self._namespace} {key} {nbytes}\n" for key in keys)
            with open(self._path, "ab", buffering=0) as file:
                file.write(text.encode())

    def read(self) -> dict[str, int]:
        """Give every key of the namespace with its page's size."""
        if not self._path or not os.path.exists(self._path):
            return dict(self._own)
        with open(self._path, encoding="ascii") as file:
            rows = [line.split() for line in file]
        return {key: int(nbytes) for namespace, key, nbytes in rows if namespace == self._namespace}


def _distributions_of(target: str) -> list[str]:
    from importlib import metadata

    if not target.partition(":")[2]:
        raise InvalidArgument("no class was named", value=repr(target), remedy="Write module:Class.")
    top = target.partition(".")[0].partition(":")[0]
    names = metadata.packages_distributions().get(top, [])
    return [f"{name} {metadata.version(name)}" for name in dict.fromkeys(names)]

"""One real vLLM release, without its native code: what versions.py says of it, and its tiering at work.

Runs in a process of its own with the release first on the path; writes ``RESULT`` and JSON.
The manager, the primary tier, the factory and the lookup thread are the release's; the host
region is plain memory, and the copies between it and a device are made by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm_fake
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering import base
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from hicache_vllm import lora, plugin, watch
from hicache_vllm.identity import FIELDS

ROWS, NBYTES, PAGES = 16, 4096, 5


class Region:
    """The host region as the primary tier uses it."""

    def __init__(self) -> None:
        self.memory = torch.zeros((ROWS, NBYTES), dtype=torch.int8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.memory.numpy())

    def cleanup(self) -> None:
        self.memory = None


def facts() -> dict:
    """Read what versions.py holds of this release off the release itself."""
    tier = base.SecondaryTierManager
    job = getattr(base, "TransferJob", None) or base.JobMetadata
    rows = {field.name for field in dataclasses.fields(job)} & {"block_ids", "chunk_ids"}
    keys = SimpleNamespace(lora_name="n", lora_path="/p", lora_int_id=1)
    hashed = kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=keys))
    connector = _source("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
    chunks = "blocks_per_chunk" in _source("vllm.distributed.kv_transfer.kv_connector.v1.offloading.config")
    return {
        "abstract": sorted(tier.__abstractmethods__),
        "tier_arguments": [*inspect.signature(tier.__init__).parameters][1:],
        "result_fields": [field.name for field in dataclasses.fields(base.JobResult)],
        "rows": rows.pop(),
        "named_verdicts": hasattr(offload, "LookupResult"),
        "marks_misses": hasattr(AsyncLookupManager, "mark_miss"),
        "hands_config": "build_offloading_config" not in connector,
        "chunks": chunks,
        "seed_constant": hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"),
        "adapter_paths": "/p" in json.dumps(hashed),
        "schedule_context": "context" in inspect.signature(tier.on_schedule_end).parameters,
        "stats": hasattr(tier, "get_stats") and hasattr(tier, "build_metric_definitions"),
        "engine": _has_method(watch.ENGINE[0], watch.ENGINE[1], watch.METHOD),
        "missing_fields": _missing_fields(),
        "lora": lora.hash_by_content(),
    }


def _source(module: str) -> str:
    """Read a module that cannot be imported without native code; empty where there is none."""
    import vllm

    path = Path(vllm.__file__).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text() if path.exists() else ""


def _has_method(module: str, owner: str, method: str) -> bool:
    return f"    def {method}(" in _source(module).partition(f"\nclass {owner}")[2].partition("\nclass ")[0]


def _missing_fields() -> list[str]:
    """Name the fields read by the adapter that this release's configuration does not have."""
    owners = {
        "vllm": "VllmConfig",
        "model": "ModelConfig",
        "cache": "CacheConfig",
        "load": "LoadConfig",
        "speculative": "SpeculativeConfig",
    }
    config = importlib.import_module("vllm.config")
    return [
        f"{owners[part]}.{name}"
        for part, names in FIELDS.items()
        for name in names
        if name not in {field.name for field in dataclasses.fields(getattr(config, owners[part]))}
    ]


class Engine:
    """The scheduler's part: a manager over one hicache tier, and a device that is a dictionary."""

    def __init__(self, model: str, options: dict, *, named: bool) -> None:
        config = vllm_fake.vllm_config(model)
        spec = vllm_fake.spec(config, old=not named)
        # Shows the config to the hook as vLLM does; the connector itself cannot be made of so little.
        with contextlib.suppress(AttributeError, ValueError, TypeError):
            KVConnectorFactory.create_connector(config, None, None)
        self.region = Region()
        primary = CPUPrimaryTierOffloadingManager(ROWS, mmap_region=self.region)
        entry = {"type": "hicache", "backend": "file", "options": options, "timeout_s": 5.0}
        self.tier = SecondaryTierFactory.create_secondary_tier(entry, primary.get_kv_memoryview(), spec)
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self._named = named

    def step(self) -> None:
        context = offload.ScheduleEndContext((), ()) if hasattr(offload, "ScheduleEndContext") else None
        self.manager.on_schedule_end(*([context] if self._named else []))

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            self.step()
            if time.monotonic() > deadline:
                raise AssertionError(f"no end of {what}")
            threading.Event().wait(0.005)

    def store(self, keys: list[bytes], contents: dict[bytes, bytes]) -> None:
        """Offload pages: device to host by hand, host to the tier by the manager."""
        request = ReqContext("writer")
        self.manager.on_new_request(request)
        prepared = self.manager.prepare_store(keys, request)
        for key, row in zip(prepared.keys_to_store, _rows(prepared.store_spec), strict=True):
            self.region.memory[int(row)] = torch.frombuffer(bytearray(contents[key]), dtype=torch.int8)
        self.manager.complete_store(keys, request)
        self.manager.on_request_finished(request)
        self.until(lambda: not self.tier.has_pending_work(), "the store")

    def load(self, keys: list[bytes], name: str) -> list[bytes | None]:
        """Look pages up as the scheduler does until each is known, and read those that are there."""
        request = ReqContext(name)
        self.manager.on_new_request(request)
        answers: dict[bytes, str] = {}

        def known() -> bool:
            answers.update({key: self._answer(self.manager.lookup(key, request)) for key in keys})
            return set(answers.values()) <= {"HIT", "MISS"}

        self.until(known, f"the lookups of {name}: {answers}")
        found = [key for key in keys if answers[key] == "HIT"]
        rows = (
            dict(zip(found, _rows(self.manager.prepare_load(found, request)), strict=True)) if found else {}
        )
        pages = [bytes(self.region.memory[int(rows[key])].numpy()) if key in rows else None for key in keys]
        if found:
            self.manager.complete_load(found, request)
        self.manager.on_request_finished(request)
        return pages

    def _answer(self, answer: object) -> str:
        if not self._named:
            return {True: "HIT", False: "MISS", None: "RETRY"}[answer]
        return answer.name


def _rows(spec: object) -> list[int]:
    return list(getattr(spec, "chunk_ids", None) if hasattr(spec, "chunk_ids") else spec.block_ids)


def damage(root: Path) -> None:
    """Overwrite the last stored page's bytes with zeros."""
    (segment,) = root.rglob("*.seg")
    content = bytearray(segment.read_bytes())
    page = bytes([PAGES]) * NBYTES
    at = content.index(page)
    content[at : at + NBYTES] = bytes(NBYTES)
    segment.write_bytes(content)


def main() -> None:
    plugin.register()
    root = Path(sys.argv[1])
    told = facts()
    named = told["named_verdicts"]
    keys = [make_offload_key(bytes([page]) * 32, 0) for page in range(1, PAGES + 1)]
    contents = {key: bytes([page]) * NBYTES for page, key in enumerate(keys, 1)}
    (root / "model").mkdir()
    (root / "model" / "model.safetensors").write_bytes(b"weights")
    options = {"root": str(root / "kv")}
    first = Engine(str(root / "model"), options, named=named)
    first.store(keys, contents)
    first.manager.shutdown()
    damage(root / "kv")
    second = Engine(str(root / "model"), options, named=named)
    absent = make_offload_key(b"\xff" * 32, 0)
    pages = second.load([*keys, absent], "reader")
    told["loaded"] = [page == contents.get(key) for key, page in zip([*keys, absent], pages, strict=True)]
    told["given"] = [page is not None for page in pages]
    if told["stats"]:
        told["stats_given"] = second.tier.get_stats() is not None
    second.manager.reset_cache()
    second.manager.shutdown()
    told["threads"] = [t.name for t in threading.enumerate() if t.name.startswith(("hicache-", "vllm_off"))]
    sys.stdout.write(f"\nRESULT {json.dumps(told)}\n")


if __name__ == "__main__":
    main()

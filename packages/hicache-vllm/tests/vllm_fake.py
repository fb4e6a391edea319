"""As much of vLLM as the adapter touches, made of plain Python; for tests that run without vLLM.

Two vintages: ``install(old=True)`` is like 0.24, without it like 0.31 and later. Only
shapes and rules that the real wheels were seen to have; test_releases.py runs the same
adapter on the real ones.
"""

from __future__ import annotations

import sys
import time
import types
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, ClassVar


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class MetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class OldResult:
    job_id: int
    success: bool


@dataclass
class Result:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class Job:
    job_id: int
    keys: list[bytes]
    chunk_ids: list[int]
    is_promotion: bool
    req_context: Any = None
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class OldJob:
    job_id: int
    keys: list[bytes]
    block_ids: list[int]
    is_promotion: bool
    req_context: Any = None


class OldTierManager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type):
        self.tier_type = tier_type


class TierManager(OldTierManager):
    medium = None

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = None
        self._bp_detector = backpressure_detector


class OldLookupManager:
    """Answers at flush, on the caller's thread, so that tests need not wait; ``hangs`` has it not answer."""

    def __init__(self, tier_type):
        self._lookup_state: dict[bytes, Any] = {}
        self._batch: list[tuple[bytes, Any]] = []
        self.hangs = False

    def lookup(self, key, req_context):
        state = self._lookup_state.get(key)
        if state is None:
            state = self._lookup_state[key] = SimpleNamespace(result=None, requests=set())
            self._batch.append((key, req_context))
        state.requests.add(req_context.req_id)
        return state.result

    def flush(self):
        if self.hangs:
            return
        batch, self._batch = self._batch, []
        keys = [key for key, _ in batch]
        if keys:
            for key, found in zip(keys, self.batch_lookup(keys, batch[0][1]), strict=True):
                self._lookup_state[key].result = found

    def cleanup(self, req_id):
        for key, state in list(self._lookup_state.items()):
            state.requests.discard(req_id)
            if not state.requests:
                del self._lookup_state[key]

    def shutdown(self):
        self.flush()


class LookupManager(OldLookupManager):
    def mark_miss(self, keys):
        for key in keys:
            if key in self._lookup_state:
                self._lookup_state[key].result = False


class TierFactory:
    def __init__(self):
        self.registry: dict[str, tuple[str, str]] = {}

    def register_tier(self, tier_type, module_path, class_name):
        if tier_type in self.registry:
            raise ValueError(f"Tier '{tier_type}' is already registered.")
        self.registry[tier_type] = (module_path, class_name)


class ConnectorStats:
    def __init__(self):
        self.counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self.gauges: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(self, name, value=1, labelvalues=()):
        self.counters[name, labelvalues] = self.counters.get((name, labelvalues), 0) + value

    def set_gauge(self, name, value, labelvalues=()):
        self.gauges[name, labelvalues] = value


def install(*, old: bool = False) -> dict[str, types.ModuleType]:
    """Put the modules in place; gives them by name."""

    class ConnectorFactory:
        made: ClassVar[list[Any]] = []

        @classmethod
        def create_connector(cls, config, role, kv_cache_config):
            cls.made.append((config, role))
            return f"connector of {role}"

    class EngineCore:
        def __init__(self):
            self.calls: list[Any] = []

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            self.calls.append((method, args))
            return ["done"]

    def adapter_keys(request):
        if not request.lora_request:
            return []
        adapter = request.lora_request
        return [adapter.lora_name] if old else [("lora", adapter.lora_name, adapter.lora_path)]

    base = {"RequestOffloadingContext": RequestOffloadingContext}
    if not old:
        base |= {"LookupResult": LookupResult, "Medium": Medium, "Locality": Locality}
        base |= {"OffloadingCounterMetadata": MetricMetadata, "OffloadingGaugeMetadata": MetricMetadata}
    platform = SimpleNamespace(device_type="cpu", get_device_capability=lambda: None)
    hashing = {"_gen_lora_extra_hash_keys": adapter_keys} | (
        {} if old else {"DEFAULT_NONE_HASH_SEED": "fake-seed"}
    )
    contents = {
        "vllm": {"__version__": "0.24.0" if old else "0.32.0"},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1.kv_offload.base": base,
        "vllm.v1.kv_offload.tiering.base": {
            "SecondaryTierManager": OldTierManager if old else TierManager,
            "JobResult": OldResult if old else Result,
        },
        "vllm.v1.kv_offload.tiering.async_lookup": {
            "AsyncLookupManager": OldLookupManager if old else LookupManager
        },
        "vllm.v1.kv_offload.tiering.factory": {"SecondaryTierFactory": TierFactory()},
        "vllm.v1.core.kv_cache_utils": hashing,
        "vllm.v1.engine.core": {"EngineCore": EngineCore},
        "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": ConnectorFactory},
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
            "OffloadingConnectorStats": ConnectorStats
        },
    }
    for name, members in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                module = sys.modules[path] = types.ModuleType(path)
                module.__path__ = []
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        for attribute, value in members.items():
            setattr(sys.modules[name], attribute, value)
    return {name: sys.modules[name] for name in contents}


def vllm_config(model: str, **changes: Any) -> Any:
    """Make what the adapter reads of a VllmConfig; a change is named ``part__field``."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": model,
            "revision": None,
            "quantization": None,
            "dtype": "torch.bfloat16",
            "hf_overrides": {},
            "max_model_len": 4096,
            "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
        },
        "cache_config": {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256"},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
        },
        "load_config": {"load_format": "auto"},
        "attention_config": {"backend": None},
        "kv_transfer_config": {"engine_id": "engine-1"},
    }
    whole: dict[str, Any] = {"lora_config": None, "speculative_config": None}
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        if attribute:
            parts[part][attribute] = value
        else:
            whole[part] = value
    return Config(**whole, **{name: SimpleNamespace(**members) for name, members in parts.items()})


class Config:
    """Like vLLM's, something that a weak reference can hold."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


def spec(config: Any, *, old: bool = False, blocks: int = 1, groups: int = 1, **changes: Any) -> Any:
    """Make an offloading spec over a config."""
    layers = [(f"layers.{number}.attn",) for number in range(groups)]
    if old:
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names) for names in layers])
        return SimpleNamespace(
            vllm_config=config, kv_cache_config=cache, gpu_block_size=(16,) * groups, block_size_factor=blocks
        )
    excerpt = {
        "groups": tuple(
            SimpleNamespace(tokens_per_block=16, layer_names=names, group_id=number)
            for number, names in enumerate(layers)
        ),
        "engine_id": config.kv_transfer_config.engine_id,
        "kv_cache_layout": "NHD",
        "canonical_layout": False,
        "replicated_layout": False,
        "parallel": SimpleNamespace(is_parallelism_agnostic=False),
    }
    return SimpleNamespace(config=SimpleNamespace(**(excerpt | changes)), blocks_per_chunk=blocks)

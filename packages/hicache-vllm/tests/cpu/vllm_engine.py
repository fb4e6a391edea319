"""A whole vLLM in this process, driven by one JSON argument; writes ``RESULT`` and what each step gave.

Keys: ``model``; ``tier``, an entry of secondary_tiers or null; ``steps``, each a list of prompts to
answer one after the other, or {"write": {path: text}}, {"signal": number, "pids": [...]}, {"rpc": method};
``blocks_per_chunk``; ``lora``; ``threads``. Prefix caching is off unless ``prefix_caching``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

BLOCK = 32


def transfer_config(wanted: dict) -> KVTransferConfig | None:
    if wanted.get("tier") is None:
        return None
    extra = {
        "cpu_bytes_to_use": wanted.get("cpu_bytes", 64 << 20),
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "vllm_cpu_spec",
        "secondary_tiers": [wanted["tier"]],
    }
    if "blocks_per_chunk" in wanted:
        extra["blocks_per_chunk"] = wanted["blocks_per_chunk"]
    return KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


def make_engine(wanted: dict) -> LLM:
    more = {"enable_lora": True, "max_lora_rank": 8} if wanted.get("lora") else {}
    return LLM(
        model=wanted["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=4,
        block_size=BLOCK,
        enable_prefix_caching=bool(wanted.get("prefix_caching")),
        disable_log_stats=False,
        kv_transfer_config=transfer_config(wanted),
        **more,
    )


def metrics(llm: LLM) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value") and ("kv_offload" in metric.name or "prefix_cache" in metric.name):
            labels = [f"{k}={v}" for k, v in metric.labels.items() if k not in ("engine", "model_name")]
            name = metric.name.removeprefix("vllm:") + ("{" + ",".join(labels) + "}" if labels else "")
            found[name] = found.get(name, 0) + metric.value
    return {name: value for name, value in found.items() if value}


def answer(llm: LLM, prompt: str, tokens: int, adapter: list | None) -> dict:
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = LoRARequest(*adapter) if adapter else None
    started = time.monotonic()
    (output,) = llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)
    return {
        "prompt": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "seconds": time.monotonic() - started,
        "ids": list(output.outputs[0].token_ids),
    }


def settle(llm: LLM, seconds: float) -> None:
    """Step the engine until what is in flight between the tiers has ended, for a bounded time."""
    core = llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.get_kv_connector()
    deadline = time.monotonic() + seconds
    while connector is not None and connector.has_pending_push_work() and time.monotonic() < deadline:
        core.step()
        threading.Event().wait(0.005)


def step(llm: LLM, what: dict, wanted: dict) -> object:
    for path, text in what.get("write", {}).items():
        Path(path).write_text(text)
    for pid in what.get("pids", ()):
        os.kill(pid, what["signal"])
    if "rpc" in what:
        llm.collective_rpc(what["rpc"])
    if "prompts" in what:
        tokens = what.get("tokens", 16)
        return [answer(llm, prompt, tokens, what.get("adapter")) for prompt in what["prompts"]]
    return None


def main() -> None:
    wanted = json.loads(sys.argv[1])
    llm = make_engine(wanted)
    answer(llm, "not related", 2, None)
    try:
        given = []
        for what in wanted["steps"]:
            given.append(step(llm, what, wanted))
            settle(llm, what.get("settle_s", 10))
        result = {"steps": given, "metrics": metrics(llm)}
    finally:
        llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")


if __name__ == "__main__":
    main()

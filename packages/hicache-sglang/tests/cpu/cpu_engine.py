"""A real sgl.Engine on a CPU with a tiny random model: what it answers, and where its prefix came from.

    python cpu_engine.py '{"backend": "hicache.file", "extra": {...}, "model": "FOLDER", "steps": [...]}'

Runs the steps in order and prints one JSON object a step, with the ids and how many
tokens came from storage. A step is ``{}`` (generate), or has ``flush`` (flush the
device and host caches first), ``write`` (path and text: makes a store misbehave),
``until_storage`` (again and again, until storage is used), ``update`` (replace the
weights from this folder first), ``lora`` (the adapter's name). ``weights`` maps
folders of models to seeds: real safetensors files are written there, instead of
weights made up from the config. ``adapters`` maps names to folder and seed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

PAGE = 16
#: SGLang takes what other programs allocate while it loads for its own weights, and refuses to start where
#: those exceed this share; the pools' sizes come from max_total_tokens.
MEMORY_SHARE = 0.9
#: An update of weights is an assertion in a scheduler that is not idle, and nothing says whether it is.
IDLE_AFTER_S = 0.7
PROMPT = [7 + (i * 37) % 200 for i in range(33 * PAGE + 5)]


def make_model(folder: Path) -> Path:
    """Write the config of a Llama of two layers; its weights are made up by ``load_format=dummy``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_weights(folder: Path, seed: int) -> None:
    """Write random weights for make_model's config."""
    import torch
    from safetensors.torch import save_file

    make_model(folder)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) * 0.2).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": random(256, 64), "lm_head.weight": random(256, 64)}
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
            "mlp.down_proj": (64, 128),
        }.items():  # fmt: skip
            weights[f"{prefix}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(64, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def make_adapter(folder: Path, seed: int) -> None:
    """Write a random LoRA adapter for make_model's config, large enough to change what is answered."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rank, generator = 4, torch.Generator().manual_seed(seed)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(2):
        for name, rows in {"q_proj": 64, "k_proj": 32, "v_proj": 32}.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (rank, 64)), ("lora_B", (rows, rank))):
                values = torch.randn(shape, generator=generator)
                weights[f"{prefix}.{part}.weight"] = (values * 0.3).to(torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


def arguments(model: str, backend: str | None, extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Give an engine's keyword arguments for a CPU, with a hierarchical cache when there is a backend."""
    chosen: dict[str, Any] = dict(
        model_path=model, device="cpu", load_format="dummy", attention_backend="torch_native",
        sampling_backend="pytorch", grammar_backend="none", skip_tokenizer_init=True, disable_cuda_graph=True,
        disable_overlap_schedule=True, mem_fraction_static=MEMORY_SHARE, max_total_tokens=2048,
        page_size=PAGE, context_length=1024, dtype="bfloat16", log_level="warning",
    )  # fmt: skip
    if backend is not None:
        chosen |= dict(
            enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_mem_layout="page_first_direct",
            hicache_io_backend="direct", hicache_storage_backend=backend,
            hicache_storage_prefetch_policy="wait_complete", hicache_write_policy="write_through",
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE, **extra}),
        )  # fmt: skip
    return chosen | more


def generate(engine: Any, lora: str | None = None) -> dict[str, Any]:
    started = time.monotonic()
    more = {"lora_path": [lora]} if lora else {}
    sampling = {"max_new_tokens": 4, "temperature": 0}
    answer = engine.generate(input_ids=[PROMPT], sampling_params=sampling, **more)[0]
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return {
        "ids": answer["output_ids"],
        "cached": answer["meta_info"].get("cached_tokens", 0),
        "storage": details.get("storage", 0),
        "seconds": round(time.monotonic() - started, 2),
    }


def flush(engine: Any, timeout_s: float = 20.0) -> None:
    """Flush the device and host caches; refused until everything is backed up to storage, so tried again."""
    deadline = time.monotonic() + timeout_s
    while not engine.flush_cache().success:
        if time.monotonic() > deadline:
            raise TimeoutError("the cache was not flushed")
        threading.Event().wait(0.05)


def take(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    """Do one step."""
    for path, text in step.get("write", {}).items():
        Path(path).write_text(text)
    if "update" in step:
        threading.Event().wait(IDLE_AFTER_S)
        success, message, *_ = engine.update_weights_from_disk(step["update"])
        if not success:
            raise RuntimeError(message)
    deadline = time.monotonic() + step.get("until_storage", 0)
    while True:
        if step.get("flush"):
            flush(engine)
        answer = generate(engine, step.get("lora"))
        if answer["storage"] or time.monotonic() >= deadline:
            return answer


def main() -> None:
    import sglang

    wanted = json.loads(sys.argv[1])
    for folder, seed in wanted.get("weights", {}).items():
        make_weights(Path(folder), seed)
    more: dict[str, Any] = {"load_format": "auto"} if "weights" in wanted else {}
    adapters = wanted.get("adapters", {})
    for folder, seed in adapters.values():
        make_adapter(Path(folder), seed)
    if adapters:
        paths = {name: folder for name, (folder, _) in adapters.items()}
        more |= {"lora_paths": paths, "lora_backend": "torch_native", "max_loras_per_batch": 3}
    chosen = arguments(wanted["model"], wanted.get("backend"), wanted.get("extra", {}), **more)
    engine = sglang.Engine(**chosen)
    answers = [take(engine, step) for step in wanted.get("steps", [{}])]
    if wanted.get("backend"):
        flush(engine)
    engine.shutdown()
    sys.stdout.write("RESULT " + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()

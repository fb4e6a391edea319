"""A model and a tokenizer made on the spot: random weights, one token a byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path

#: Sizes by name: about 3 and 51 million parameters.
SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 704},
    "small": {
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
    },
}


def make_model(folder: Path, size: str = "tiny", seed: int = 0) -> str:
    """Write a Qwen2 of this size and return its folder; its answers depend on all of the context."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    for name in special.values():
        vocabulary[name] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8192, **special).save_pretrained(
        folder
    )
    config = Qwen2Config(
        vocab_size=320,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=vocabulary["<|bos|>"],
        eos_token_id=vocabulary["<|eos|>"],
        tie_word_embeddings=False,
        initializer_range=0.08,
        **SIZES[size],
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return str(folder)


def make_adapter(folder: Path, size: str = "tiny", seed: int = 1, rank: int = 4) -> str:
    """Write a LoRA adapter of the attention's projections and return its folder."""
    import torch
    from safetensors.torch import save_file

    hidden = SIZES[size]["hidden_size"]
    kv = hidden // SIZES[size]["num_attention_heads"] * 2
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(SIZES[size]["num_hidden_layers"]):
        for name, out in (("q_proj", hidden), ("v_proj", kv)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, hidden) * 0.3
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, rank) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "made-on-the-spot",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), *sys.argv[2:3])

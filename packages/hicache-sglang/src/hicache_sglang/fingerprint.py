"""What LoRA adapters and small files are: digests of their content; the weights' own is core's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hicache_core.fingerprint import weights_digest


def adapters_digest(adapters: Mapping[str, str]) -> str | None:
    """Digest the content of a set of LoRA adapters; None for no adapters.

    Args:
        adapters: path by name, as the server knows them.

    Raises:
        LookupError: an adapter that cannot be read here, so that its content is unknown.
    """
    if not adapters:
        return None
    parts = []
    for name, path in sorted(adapters.items()):
        digest = weights_digest(path)
        if digest is None:
            raise LookupError(f"the LoRA adapter {name!r} at {path!r} cannot be read")
        parts.append(f"{name}\0{digest}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def adapter_paths(lora_paths: Any) -> dict[str, str]:
    """Read the server's ``lora_paths`` in any of its forms: mapping, ``name=path``, records, references."""
    if not lora_paths:
        return {}
    if isinstance(lora_paths, Mapping):
        items: Iterable[Any] = [(name, value) for name, value in lora_paths.items()]
    else:
        items = lora_paths
    found: dict[str, str] = {}
    for item in items:
        name, path = _name_and_path(item)
        found[name] = path
    return found


def file_digest(path: str) -> str | None:
    """Digest one small file whole (KV scales); None where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _name_and_path(item: Any) -> tuple[str, str]:
    if isinstance(item, str):
        name, _, path = item.partition("=")
        return (name, path) if path else (item, item)
    if isinstance(item, tuple):
        name, value = item
        return (name, value) if isinstance(value, str) else _name_and_path(value)
    if isinstance(item, Mapping):
        return str(item["lora_name"]), str(item["lora_path"])
    return str(item.lora_name), str(item.lora_path)

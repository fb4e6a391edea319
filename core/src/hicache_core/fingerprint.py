"""What weights are, cheaply: a digest that changes when they do; of a model, or of a LoRA adapter.

Reading hundreds of gigabytes at start is out of the question, and a path or a time
stamp is not content. So: a content-addressed blob of the Hugging Face cache names
itself; a file outside it is sampled: its size, its head (for safetensors the
tensors' names, types and offsets) and slices spread over it.

The samples are equal on every machine that holds equal files, wherever they lie. A
cached blob and a plain copy of it have different digests: a miss, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

#: Slices a file, and their size in bytes. A shard holds tens of tensors, so 64 slices meet every large one;
#: with the head that is 384 KiB a shard, whatever its size: 60 MB for a model of 160 shards.
SLICES = 64
SLICE_NBYTES = 4096
#: The head of a safetensors file holds its table of tensors; tens of kilobytes a shard.
HEAD_NBYTES = 128 << 10

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_INDEXES = (
    "config.json",
    ".index.json",
    "adapter_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
)
_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")

#: Name, size, modification in nanoseconds and inode of each file that counts.
Stamp = tuple[tuple[str, int, int, int], ...]


def weights_digest(model: str, revision: str | None = None, load_format: str = "auto") -> str | None:
    """Digest the weights that a server loaded; None where they cannot be found on this machine.

    Args:
        model: a folder or file, or a Hugging Face id whose snapshot is cached here.
        load_format: with ``dummy`` the weights are made up from the config alone.
    """
    folder = _locate(model, revision)
    if folder is None:
        return None
    dummy = load_format == "dummy"
    digest = _digest_files(folder, _INDEXES if dummy else _WEIGHTS + _INDEXES)
    return f"{'dummy' if dummy else 'sampled'}:{digest}" if digest else None


def stamp_of(model: str) -> Stamp | None:
    """Tell when the files of an adapter last changed; None where they cannot be found."""
    folder = _locate(model, None)
    if folder is None:
        return None
    try:
        stats = [(path.name, path.stat()) for path in _files(folder, _WEIGHTS + _INDEXES)]
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats) or None


def _locate(model: str, revision: str | None) -> Path | None:
    path = Path(model)
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        return None
    entry = _hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        commit = (entry / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision or ""
    snapshot = entry / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def _hub_cache() -> Path:
    """Find the Hugging Face cache as its own library does (documented variables)."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return Path(cache) if cache else Path(home) / "hub"


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffixes))


def _digest_files(folder: Path, suffixes: tuple[str, ...]) -> str:
    """Digest the files of a folder, relative names included; empty where there are none."""
    try:
        files = _files(folder, suffixes)
        if not files:
            return ""
        hasher = hashlib.sha256()
        for path in files:
            content = _content_of(path)
            hasher.update(f"{path.name}\0{len(content)}\0{content}\n".encode())
        return hasher.hexdigest()
    except OSError:
        return ""


def _content_of(path: Path) -> str:
    """Name a file's content: by its blob in the Hugging Face cache, else by samples."""
    target = os.readlink(path) if path.is_symlink() else ""
    blob = os.path.basename(target)
    if _BLOB.fullmatch(blob) and os.path.basename(os.path.dirname(target)) == "blobs":
        return f"blob:{blob}"
    hasher = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        hasher.update(f"{size}\0".encode())
        for offset, nbytes in _slices(size):
            hasher.update(os.pread(file.fileno(), nbytes, offset))
    return f"sample:{hasher.hexdigest()}"


def _slices(size: int) -> Iterable[tuple[int, int]]:
    """Give what is read of a file: all of a small one, else the head, the tail and slices between."""
    if size <= HEAD_NBYTES + SLICES * SLICE_NBYTES:
        return [(0, size)] if size else []
    step = (size - SLICE_NBYTES) // SLICES
    return [(0, HEAD_NBYTES), *((step * (i + 1), SLICE_NBYTES) for i in range(SLICES))]

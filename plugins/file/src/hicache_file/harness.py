"""FileHarness: a root in a temporary folder, and a second reader of the format.

Nothing is started. The back door below reads and writes segments with struct
alone, from docs/decisions' description of the format and not from the backend's
modules, so that it is an independent opinion on what lies on the disk.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hicache_conformance.harness import BaseHarness, Damage, HarnessError
from hicache_core import Namespace

#: Large enough for the suite, and a budget, so that eviction is proven too.
_CAPACITY = 2 << 30

_HEAD = struct.Struct("<8sII16s16s16sQQI4xQQQ8xQ")
_VERSION_WORD = 1 | 0xFFFE << 16
_FACTORS = (
    0x243F6A8885A308D3,
    0x13198A2E03707345,
    0xA4093822299F31D1,
    0x082EFA98EC4E6C89,
    0x452821E638D01377,
    0xBE5466CF34E90C6D,
    0xC0AC29B7C97C50DD,
)
_POSITION, _FINISH = 0x3F84D5B5B5470917, 0x9216D5D98979FB1B
_ALL = (1 << 64) - 1


@dataclass(frozen=True)
class _Found:
    """Where a value lies."""

    file: Path
    offset: int
    length: int


class FileHarness(BaseHarness):
    """A root of its own for each run."""

    faults = frozenset(
        (
            "bounded",
            "second_process",
            "stored_bytes",
            "store_bytes",
            "damage_flip",
            "damage_zero",
            "damage_truncate",
        )
    )

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._folder: Path | None = None
        self._root: Path | None = None
        self._roots = 0

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-file-", dir=self.given.get("root")))
        self._fresh()

    def stop(self) -> None:
        folder, self._folder, self._root = self._folder, None, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def options(self) -> dict[str, Any]:
        return {"capacity": _CAPACITY} | self.given | {"root": str(self._path())}

    def bounded(self, capacity: int) -> dict[str, Any]:
        self._fresh()
        return self.options() | {"capacity": capacity}

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        found = self._find(namespace, key)
        if found is None:
            return None
        with found.file.open("rb") as file:
            file.seek(found.offset)
            return file.read(found.length)

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        folder = self._path() / namespace.id
        if not (folder / "epoch").exists():
            raise HarnessError("the namespace does not exist yet", value=str(folder))
        _write_segment(folder, namespace, key.encode(), value)

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        found = self._find(namespace, key)
        if found is None:
            raise HarnessError(f"no value to damage under '{key}'")
        with found.file.open("r+b") as file:
            file.seek(found.offset)
            value = file.read(found.length)
            file.seek(found.offset)
            if how == "flip":
                file.write(bytes([value[0] ^ 1]))
            elif how == "zero":
                file.write(bytes(found.length))
            elif how == "truncate" and self._is_last(namespace, found):
                os.truncate(found.file, found.offset + found.length - 1)
            elif how == "truncate":  # others lie behind it: its second half is what a hole leaves
                file.seek(found.offset + found.length // 2)
                file.write(bytes(found.length - found.length // 2))
            else:
                raise self._cannot(f"damage_{how}")

    def _fresh(self) -> None:
        if self._folder is None:
            raise HarnessError("the harness has not been started", remedy="Call start() first.")
        self._roots += 1
        self._root = self._folder / f"root-{self._roots}"

    def _path(self) -> Path:
        if self._root is None:
            raise HarnessError("the harness has not been started", remedy="Call start() first.")
        return self._root

    def _is_last(self, namespace: Namespace, found: _Found) -> bool:
        ends = [o + n for _, o, n in _records(found.file.with_suffix(".idx"))]
        return max(ends) == found.offset + found.length

    def _find(self, namespace: Namespace, key: str) -> _Found | None:
        """Find a live value; of several copies the one in the youngest segment."""
        digest = xxhash.xxh3_128_digest(key.encode())
        folder = self._path() / namespace.id
        best: tuple[int, _Found] | None = None
        for journal in sorted(folder.glob("*.idx")):
            sequence = _HEAD.unpack(journal.read_bytes()[: _HEAD.size])[6]
            for stored, offset, length in _records(journal):
                if stored == digest and (best is None or sequence >= best[0]):
                    best = (sequence, _Found(journal.with_suffix(".seg"), offset, length))
        return best[1] if best else None


def _records(journal: Path) -> Iterator[tuple[bytes, int, int]]:
    """Give (digest, offset, length) of the live records of a journal, up to the first bad one."""
    raw = journal.read_bytes()
    head = _HEAD.unpack(raw[: _HEAD.size])
    segment_id, room = head[3], head[8]
    dead = raw[_HEAD.size : _HEAD.size + room]
    start = _HEAD.size + 2 * room
    for number in range((len(raw) - start) // 64):
        body = raw[start + 64 * number : start + 64 * number + 64]
        words = struct.unpack("<8Q", body)
        if words[7] != _seal(words[:7], segment_id, number) or not words[4]:
            return
        if not dead[number]:
            yield body[:16], words[3], words[4]


def _seal(words: tuple[int, ...], segment_id: bytes, number: int) -> int:
    low, high = struct.unpack("<QQ", segment_id)
    mixed = sum(word * factor for word, factor in zip(words, _FACTORS, strict=True))
    mixed = (mixed + number * _POSITION + (low ^ high)) & _ALL
    mixed ^= mixed >> 32
    mixed = mixed * _FINISH & _ALL
    return mixed ^ mixed >> 32


def _write_segment(folder: Path, namespace: Namespace, key: bytes, value: bytes) -> None:
    """Make a sealed segment of one value and publish it."""
    segment_id, owner = os.urandom(16), bytes.fromhex(namespace.id)
    live = (folder / "epoch").read_bytes()
    epoch, events = struct.unpack("<QQ", live[64:80])
    slots = struct.unpack("<I", live[12:16])[0]
    data = folder / f"{segment_id.hex()}.seg"
    data.write_bytes(value)
    words = (
        *struct.unpack("<QQ", xxhash.xxh3_128_digest(key)),
        xxhash.xxh64_intdigest(key),
        0,
        len(value),
        xxhash.xxh3_64_intdigest(value),
        1,
    )
    boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    head = struct.pack(
        "<8sII16s16s16sQQI4xQQQ8x",
        b"HICAJRNL",
        _VERSION_WORD,
        0,
        segment_id,
        owner,
        boot,
        1,
        epoch,
        64,
        len(value),
        0,
        data.stat().st_ino,
    )
    record = struct.pack("<8Q", *words, _seal(words, segment_id, 0))
    (folder / f"{segment_id.hex()}.idx").write_bytes(_checked(head) + bytes(128) + record)
    event = segment_id + struct.pack("<QI", 1, 1)
    with (folder / "epoch").open("r+b") as file:
        file.seek(128 + events % slots * 32)
        file.write(event + struct.pack("<I", xxhash.xxh32_intdigest(event)))
        file.seek(64)
        file.write(_checked(struct.pack("<QQ", epoch, events + 1)))


def _checked(body: bytes) -> bytes:
    return body + xxhash.xxh3_64_digest(body)

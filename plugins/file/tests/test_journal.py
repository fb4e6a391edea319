"""Records and headers: what is written is read, and nothing else is; a second opinion in plain Python."""

from __future__ import annotations

import os
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_file import _format as fmt
from hicache_file import _journal as journal
from hicache_file._index import RECORD_BITS
from hicache_file.harness import _seal

ID = bytes(range(16))
KEYS = [f"key-{n}".encode() for n in range(20)]


def records(count: int = 20, first: int = 0, sums: list[int] | None = None) -> journal.Words:
    return journal.build(
        ID,
        first,
        journal.digests_of(KEYS[:count]),
        journal.checks_of(KEYS[:count]),
        offset=4096,
        nbytes=1000,
        sums=sums,
    )


def test_records_say_what_they_were_built_of() -> None:
    built = records(sums=list(range(20)))
    for number, row in enumerate(built.tolist()):
        digest = struct.pack("<QQ", row[0], row[1])
        assert digest == xxhash.xxh3_128_digest(KEYS[number])
        assert row[2:7] == [xxhash.xxh64_intdigest(KEYS[number]), 4096 + 1000 * number, 1000, number, 1]
    assert records()[:, journal.FLAGS].tolist() == [0] * 20


def test_the_seal_is_the_one_of_the_format_page() -> None:
    built = records(first=7)
    assert built[:, 7].tolist() == [_seal(tuple(row[:7]), ID, 7 + n) for n, row in enumerate(built.tolist())]


def test_the_seal_is_frozen() -> None:
    assert records(1)[0, 7] == 12373551782341369164


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20 * 64 - 1), st.integers(0, 7), st.binary(max_size=130))
def test_parsing_stops_at_the_first_bad_record(at: int, bit: int, tail: bytes) -> None:
    raw = bytearray(records().tobytes() + tail)
    raw[at] ^= 1 << bit
    assert journal.parse(bytes(raw), ID).tolist() == records()[: at // 64].tolist()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 64 * 20 - 1, 64 * 20])
def test_a_piece_of_a_record_is_none(length: int) -> None:
    assert len(journal.parse(records().tobytes()[:length], ID)) == length // 64


def test_zeros_another_place_and_another_segment_do_not_parse() -> None:
    raw = records().tobytes()
    assert len(journal.parse(bytes(64 * 5), ID)) == 0
    assert len(journal.parse(raw, ID, first=1)) == 0
    assert len(journal.parse(raw, bytes(16))) == 0
    assert len(journal.parse(raw[64:], ID)) == 0
    assert len(journal.parse(raw[64:], ID, first=1)) == 19


def test_moved_records_keep_their_sums_and_lie_one_behind_the_other() -> None:
    moved = journal.reseal(records(sums=list(range(20)))[[3, 9, 17]], bytes(16))
    assert moved[:, journal.OFFSET].tolist() == [0, 1000, 2000]
    assert moved[:, journal.SUM].tolist() == [3, 9, 17]
    assert len(journal.parse(moved.tobytes(), bytes(16))) == 3


HEADER = fmt.SegmentHeader(ID, bytes(16), b"b" * 16, 7, 9, 128, 1 << 20, 123, 55, True)


def test_headers_are_read_as_written() -> None:
    assert fmt.unpack_journal_head(fmt.pack_journal_head(HEADER)) == HEADER
    assert fmt.unpack_root_head(fmt.pack_root_head(ID)) == ID
    state = fmt.RootState(1, 2, 3, 1, 4, ID)
    assert fmt.unpack_root_state(fmt.pack_root_state(state)) == state
    assert fmt.unpack_epoch_head(fmt.pack_epoch_head(ID, 32)) == (32, ID)
    assert fmt.unpack_epoch_live(fmt.pack_epoch_live(5, 6)) == (5, 6)
    event = fmt.Event(fmt.BURIED, ID, 1 << 40)
    assert fmt.unpack_event(fmt.pack_event(event, 7), 7) == event
    slot = fmt.Slot(ID, ID, 99)
    assert fmt.unpack_slots(fmt.pack_slot(slot) + bytes(47)) == [slot]


@pytest.mark.parametrize("at", [0, 8, 9, 12, 16, 64, 80, 119, 127])
def test_a_flipped_bit_of_a_header_is_damage_and_never_another_version(at: int) -> None:
    for bit in range(8):
        raw = bytearray(fmt.pack_journal_head(HEADER))
        raw[at] ^= 1 << bit
        with pytest.raises(fmt.BadHeader):
            fmt.unpack_journal_head(bytes(raw))


def test_another_version_is_told_from_damage() -> None:
    raw = bytearray(fmt.pack_journal_head(HEADER))
    raw[8:12] = (2 | (2 ^ 0xFFFF) << 16).to_bytes(4, "little")
    with pytest.raises(fmt.UnknownVersion) as unknown:
        fmt.unpack_journal_head(bytes(raw))
    assert unknown.value.version == 2


@pytest.mark.parametrize("length", [0, 5, 127])
def test_a_short_header_is_damage(length: int) -> None:
    with pytest.raises(fmt.BadHeader):
        fmt.unpack_journal_head(fmt.pack_journal_head(HEADER)[:length])


def test_a_journal_has_room_for_the_smallest_pages_and_fits_the_index() -> None:
    assert [fmt.journal_room(n) for n in (0, 1 << 16, 1 << 20, (1 << 20) + 4096, 64 << 20)] == [
        64,
        64,
        256,
        320,
        16384,
    ]
    assert fmt.journal_room(64 << 20) < 1 << RECORD_BITS
    assert os.path.basename(fmt.__file__) == "_format.py"

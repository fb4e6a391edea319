"""The format on disk: frozen by one vector, and every damage found."""

from __future__ import annotations

import pytest

from hicache_nixl.trailer import Verdict, checksum, examine, pack, padded_nbytes, plain_nbytes

PAGE = bytes(range(256)) * 16
KEY = "0" * 32 + "/abc.kv_0123456789abcdef"
#: A change of this orphans every store; raise the version in trailer.py with it.
FROZEN = "4849434e49584c0a0100010000000000001000000000000003916578969f7a66eb4b7c3707879151ea5537f233ad2abd"


def test_trailer_layout_is_frozen():
    trailer = pack(KEY, len(PAGE), checksum([memoryview(PAGE)]))
    assert len(trailer) == 64
    assert trailer[:48].hex() == FROZEN
    assert trailer[48:] == bytes(16)


@pytest.mark.parametrize("at", range(48))
def test_trailer_with_any_byte_changed_is_damaged(at):
    trailer = bytearray(pack(KEY, len(PAGE), checksum([memoryview(PAGE)])))
    trailer[at] ^= 1
    assert examine(bytes(trailer), KEY, len(PAGE))[0] is Verdict.DAMAGED


def test_trailer_of_another_key_is_damaged():
    assert examine(pack(KEY, 4096, bytes(16)), KEY + "x", 4096) == (Verdict.DAMAGED, None)


def test_trailer_of_another_size_says_so():
    assert examine(pack(KEY, 4096, bytes(16)), KEY, 8192) == (Verdict.OTHER_SIZE, None)


def test_trailer_without_a_checksum_promises_none():
    assert examine(pack(KEY, 4096, None), KEY, 4096) == (Verdict.GOOD, None)


@pytest.mark.parametrize("cuts", [[4096], [1000, 3096], [1] * 4096])
def test_checksum_is_of_the_joined_bytes(cuts):
    view, segments, at = memoryview(PAGE), [], 0
    for cut in cuts:
        segments.append(view[at : at + cut])
        at += cut
    assert checksum(segments) == checksum([view])


@pytest.mark.parametrize("nbytes", [1, 64, 4032, 4095, 4096, 4097, 1 << 20])
def test_plain_and_padded_files_never_have_one_size(nbytes):
    assert plain_nbytes(nbytes) != padded_nbytes(nbytes)
    assert padded_nbytes(nbytes) % 4096 == 0

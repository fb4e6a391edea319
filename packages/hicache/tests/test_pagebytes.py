from __future__ import annotations

import pytest

from hicache_cli.pagebytes import PageBytes
from hicache_core import InvalidArgument

HASH = PageBytes.hash_of(1)
OTHER = PageBytes.hash_of(2)


def page(contents: PageBytes, page_hash: str) -> bytearray:
    slot = bytearray(contents.page_nbytes)
    contents.fill(memoryview(slot), page_hash)
    return slot


@pytest.mark.parametrize("nbytes", [32, 33, 4096, 1 << 16])
def test_a_page_has_its_hash_at_both_ends_and_matches_itself(nbytes):
    contents = PageBytes(nbytes)
    slot = page(contents, HASH)
    assert bytes(slot[:16]) == bytes(slot[-16:]) == bytes.fromhex(HASH[:32])
    assert contents.matches(memoryview(slot), HASH)
    assert not contents.matches(memoryview(slot), OTHER)


def test_two_instances_make_the_same_page():
    assert page(PageBytes(4096), HASH) == page(PageBytes(4096), HASH)


def test_every_single_byte_is_verified():
    contents = PageBytes(256)
    slot = page(contents, HASH)
    for place in range(len(slot)):
        slot[place] ^= 1
        assert not contents.matches(memoryview(slot), HASH), place
        slot[place] ^= 1
    assert contents.matches(memoryview(slot), HASH)


def test_pages_differ_in_the_middle_too():
    contents = PageBytes(4096)
    middles = {bytes(page(contents, PageBytes.hash_of(n))[16:-16]) for n in range(200)}
    assert len(middles) == 200


def test_ids_of_different_types_are_different_blocks():
    assert PageBytes.hash_of(1) != PageBytes.hash_of("1")


def test_a_page_too_small_to_verify_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        PageBytes(31)
    assert str(caught.value) == "a page is too small to be verified: 31 bytes. Use at least 32 bytes a page."

"""The index against a ten-line model; collisions in the first word; the base and the overlay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_file import _index
from hicache_file._index import ABSENT, RECORD_BITS, PageIndex

#: Few first words and few second ones, so that collisions are the rule.
DIGESTS = [bytes([a]) * 8 + bytes([b]) * 8 for a in range(4) for b in range(3)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=4)),
        st.tuples(st.just("remove"), st.sampled_from(DIGESTS)),
        st.tuples(st.just("remove all"), st.sampled_from(DIGESTS)),
        st.tuples(st.just("merge"), st.none()),
        st.tuples(st.just("drop segment"), st.integers(0, 3)),
        st.tuples(st.just("load"), st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=12)),
    ),
    max_size=40,
)


def words(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_the_index_is_a_map_from_digest_to_a_set_of_places(plan: list[tuple[str, object]]) -> None:
    index, model = PageIndex(), {digest: set() for digest in DIGESTS}
    numbers = [0] * 4
    turn = 0

    def places(count: int) -> list[int]:
        nonlocal turn
        turn += 1
        segment = turn % 4
        numbers[segment] += count
        return [segment << RECORD_BITS | n for n in range(numbers[segment] - count, numbers[segment])]

    for verb, given_ in plan:
        if verb in ("insert", "load"):
            digests = list(given_)  # type: ignore[call-overload]
            where = places(len(digests))
            if verb == "insert" or turn > 1:
                index.insert(digests, where)
            else:
                index.load(*words(digests).T.copy(), np.array(where, np.int64))
            for digest, place in zip(digests, where, strict=True):
                model[digest].add(place)
        elif verb == "remove":
            (place,) = index.find([given_])  # type: ignore[list-item]
            assert index.remove(given_, place) is (place != ABSENT)  # type: ignore[arg-type]
            model[given_].discard(place)  # type: ignore[index]
        elif verb == "remove all":
            for place in index.copies(given_):  # type: ignore[arg-type]
                assert index.remove(given_, place)  # type: ignore[arg-type]
            model[given_].clear()  # type: ignore[index]
        elif verb == "merge":
            index.merge()
        else:
            index.merge({given_})  # type: ignore[arg-type]
            for copies in model.values():
                copies -= {place for place in copies if place >> RECORD_BITS == given_}
        for digest, place in zip(DIGESTS, index.find(DIGESTS), strict=True):
            assert (place in model[digest]) if model[digest] else place == ABSENT
            assert set(index.copies(digest)) == model[digest]
    assert len(index.live_places()) == sum(bool(copies) for copies in model.values())


def test_a_place_entered_twice_is_one_copy() -> None:
    index = PageIndex()
    index.insert(DIGESTS[:2], [5, 6])
    index.insert(DIGESTS[:2], [5, 6])
    assert index.spare == {}
    assert index.copies(DIGESTS[0]) == [5]


def test_the_overlay_is_merged_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index, "_MERGE_FROM", 10)
    index = PageIndex()
    rng = np.random.default_rng(1)
    digests = [rng.bytes(16) for _ in range(1000)]
    for start in range(0, 1000, 7):
        chunk = digests[start : start + 7]
        index.insert(chunk, range(start, start + len(chunk)))
    overlay, base = index._state
    assert len(overlay) <= 10 + len(base.first) // 8
    assert index.find(digests) == list(range(1000))
    assert index.find([rng.bytes(16)]) == [ABSENT]


def test_damaged_keys_are_known_until_they_are_set() -> None:
    index = PageIndex()
    index.insert(DIGESTS[:1], [5])
    assert index.remove(DIGESTS[0], 5, damaged=True)
    assert index.damaged == {DIGESTS[0]}
    index.insert(DIGESTS[:1], [6])
    assert index.damaged == set()


@pytest.mark.parametrize("ordinal", [0, 7, (1 << 18) - 1, 1 << 18, 1 << 30], ids=str)
def test_places_far_apart_are_kept_whole(ordinal: int) -> None:
    index = PageIndex()
    rng = np.random.default_rng(2)
    digests = [rng.bytes(16) for _ in range(3)]
    places = [5, ordinal << RECORD_BITS | 16383, ordinal << RECORD_BITS | 16384]
    for count in (2, 3):  # the third record does not fit the short form
        index = PageIndex()
        index.load(*words(digests[:count]).T.copy(), np.array(places[:count], np.int64))
        assert index.find(digests[:count]) == places[:count]
        assert index.remove(digests[0], 5)
        assert index.find(digests[:count]) == [ABSENT, *places[1:count]]


def test_many_digests_with_one_prefix_are_sorted_whole() -> None:
    rng = np.random.default_rng(3)
    first = (rng.integers(0, 1 << 9, 5000, np.uint64) << np.uint64(3)) | rng.integers(0, 8, 5000, np.uint64)
    first = np.unique(first)
    rng.shuffle(first)
    index = PageIndex()
    index.load(first.copy(), first.copy(), np.arange(len(first)))
    digests = [word.tobytes() * 2 for word in first]
    assert index.find(digests) == list(range(len(first)))

"""The radix cache against a naive model, and the verbs one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_core.errors import InvalidArgument, InvalidPages
from hicache_engine import PageAllocator, RadixCache, Request

PAGE = 2
KEYS = st.sampled_from([None, "lora-a"])
#: Few tokens and short prefixes, so that sequences meet and part often.
TOKENS = st.lists(st.integers(0, 1), max_size=13)


def prefixes(tokens):
    return [tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]


class RadixAgainstModel(RuleBasedStateMachine):
    """The model is a dictionary: (key, prefix) -> page; a prefix is there only with all its own prefixes."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(24)
        self.evicted = []
        self.tree = RadixCache(self.allocator, PAGE, on_evict=lambda *node: self.evicted.append(node))
        self.model = {}
        self.locked = []

    def expected(self, tokens, key):
        pages = []
        for prefix in prefixes(tokens):
            if (key, prefix) not in self.model:
                break
            pages.append(self.model[key, prefix])
        return pages

    @rule(tokens=TOKENS, key=KEYS)
    def insert(self, tokens, key):
        wanted = len(tokens) // PAGE
        known = self.expected(tokens, key)
        pages = self.allocator.take(wanted)
        if pages is None:
            return
        had = self.tree.insert(tokens, pages, key)
        assert had == len(known)
        self.allocator.give_back(pages[:had])
        for page, prefix in list(zip(pages, prefixes(tokens), strict=True))[had:]:
            self.model[key, prefix] = page

    @rule(tokens=TOKENS, key=KEYS)
    def match(self, tokens, key):
        assert self.tree.match_prefix(tokens, key).pages == self.expected(tokens, key)

    @rule(tokens=TOKENS, key=KEYS)
    def lock(self, tokens, key):
        match = self.tree.match_prefix(tokens, key)
        self.tree.lock(match.node)
        self.locked.append((match.node, key, tuple(tokens[: len(match.pages) * PAGE])))

    @rule(which=st.integers(0, 100))
    def unlock(self, which):
        if self.locked:
            node, _, _ = self.locked.pop(which % len(self.locked))
            self.tree.unlock(node)

    @rule(count=st.integers(0, 24))
    def evict(self, count):
        before = self.tree.evictable_pages
        self.evicted.clear()
        freed = self.tree.evict(count)
        assert freed >= min(count, before)
        assert freed == sum(len(pages) for _, _, pages in self.evicted)
        for tokens, key, pages in self.evicted:
            for prefix, page in list(zip(prefixes(tokens), range(99), strict=False))[-len(pages) :]:
                assert self.model.pop((key, prefix)) in pages, (prefix, page)

    @invariant()
    def the_model_is_what_the_tree_holds(self):
        for (key, prefix), page in self.model.items():
            assert self.tree.match_prefix(prefix, key).pages[-1:] == [page]
        assert self.tree.total_pages == len(self.model)
        assert self.allocator.available == 24 - len(self.model)

    @invariant()
    def locked_prefixes_stay(self):
        kept = {(key, prefix) for _, key, tokens in self.locked for prefix in prefixes(tokens)}
        assert kept <= set(self.model)
        assert self.tree.locked_pages == len(kept)


RadixAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRadixAgainstModel = RadixAgainstModel.TestCase


def a_tree(pages=32, page_tokens=4, **options):
    return RadixCache(PageAllocator(pages), page_tokens, **options)


def put(tree, tokens, key=None):
    pages = tree.allocator.take(len(tokens) // tree.page_tokens)
    tree.allocator.give_back(pages[: tree.insert(tokens, pages, key)])
    return pages


def test_a_prefix_that_parts_inside_a_page_is_not_shared():
    tree = a_tree()
    put(tree, list(range(12)))
    assert len(tree.match_prefix([*range(9), 99, 98, 97]).pages) == 2


def test_a_partial_last_page_is_neither_kept_nor_matched():
    tree = a_tree()
    put(tree, list(range(11)))
    assert tree.total_pages == 2
    assert len(tree.match_prefix(list(range(12))).pages) == 2


def test_extra_keys_never_meet():
    tree = a_tree()
    put(tree, list(range(8)), "adapter one")
    assert tree.match_prefix(list(range(8)), "adapter two").pages == []
    assert tree.match_prefix(list(range(8))).pages == []


def test_eviction_takes_the_least_recently_used_leaf_first():
    evicted = []
    tree = a_tree(on_evict=lambda tokens, key, pages: evicted.append((tokens, key)))
    put(tree, [1] * 4)
    put(tree, [2] * 4, "k")
    put(tree, [3] * 4)
    tree.match_prefix([1] * 4)
    assert tree.evict(2) == 2
    assert evicted == [((2,) * 4, "k"), ((3,) * 4, None)]


def test_an_inner_node_goes_only_after_its_leaves():
    evicted = []
    tree = a_tree(on_evict=lambda tokens, key, pages: evicted.append((len(tokens), len(pages))))
    put(tree, [1] * 4 + [2] * 4)
    put(tree, [1] * 4 + [3] * 4)
    assert tree.evict(3) == 3
    assert evicted == [(8, 1), (8, 1), (4, 1)]


def test_a_locked_node_keeps_everything_above_it_through_a_split():
    tree = a_tree()
    put(tree, list(range(16)))
    node = tree.match_prefix(list(range(16))).node
    tree.lock(node)
    tree.match_prefix(list(range(8)))  # splits the locked node
    assert tree.evict(99) == 0
    tree.unlock(node)
    assert tree.evict(99) == 4
    assert tree.allocator.available == 32


def test_a_finished_request_gives_back_the_pages_that_the_tree_had():
    tree = a_tree()
    kept = put(tree, list(range(8)))
    mine = tree.allocator.take(3)
    request = Request(list(range(12)), pages=mine, node=tree.match_prefix([]).node)
    tree.lock(request.node)
    assert tree.cache_finished_req(request) == 2
    assert tree.match_prefix(list(range(12))).pages == [*kept, mine[2]]
    assert tree.allocator.available == 32 - 3
    assert tree.locked_pages == 0


def test_wrong_counts_are_refused_and_change_nothing():
    tree = a_tree()
    with pytest.raises(InvalidArgument, match="2 pages, 4 tokens of 4 a page"):
        tree.insert([1, 2, 3, 4], [0, 1])
    assert tree.total_pages == 0


def test_unlocking_too_often_is_refused():
    tree = a_tree()
    put(tree, [1] * 4)
    node = tree.match_prefix([1] * 4).node
    with pytest.raises(InvalidArgument, match="more often than locked"):
        tree.unlock(node)


def test_reset_frees_everything_unless_something_is_in_use():
    tree = a_tree()
    put(tree, list(range(8)), "k")
    node = tree.match_prefix(list(range(8)), "k").node
    tree.lock(node)
    with pytest.raises(InvalidArgument, match="2 locked pages"):
        tree.reset()
    tree.unlock(node)
    tree.reset()
    assert (tree.total_pages, tree.allocator.available) == (0, 32)


def test_page_tokens_must_be_a_count():
    with pytest.raises(InvalidArgument, match="page_tokens"):
        RadixCache(PageAllocator(1), 0)


def test_the_allocator_gives_all_or_nothing():
    allocator = PageAllocator(4)
    assert sorted(allocator.take(3)) == [0, 1, 2]
    assert allocator.take(2) is None
    assert allocator.available == 1


@pytest.mark.parametrize("returned", [[3], [0, 0], [-1], [0, 9]])
def test_the_allocator_refuses_what_was_not_taken_and_frees_nothing(returned):
    allocator = PageAllocator(4)
    allocator.take(2)
    with pytest.raises(InvalidPages):
        allocator.give_back(returned)
    assert allocator.available == 2


def test_many_random_requests_leave_no_page_behind():
    rng = random.Random(7)
    tree = a_tree(pages=64, page_tokens=1)
    for _ in range(2_000):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        match = tree.match_prefix(tokens)
        tree.lock(match.node)
        need = len(tokens) - len(match.pages)
        if tree.allocator.available < need:
            tree.evict(need - tree.allocator.available)
        fresh = tree.allocator.take(need)
        request = Request(tokens, pages=match.pages + fresh, node=match.node)
        tree.cache_finished_req(request)
    assert tree.locked_pages == 0
    assert tree.allocator.available + tree.total_pages == 64
    tree.evict(64)
    assert tree.allocator.available == 64

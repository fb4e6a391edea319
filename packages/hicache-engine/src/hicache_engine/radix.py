"""RadixCache: which prefixes lie in memory, and in which pages.

A tree over pages of tokens. A node holds one or more whole pages; a child is
found by its first page's tokens; a prefix that ends or parts inside a node
splits it. Every ``extra_key`` has a root of its own, so adapters and salts
never meet. Pages of a node that is locked, or above a locked one, stay; the
rest is evicted leaf by leaf, least recently used first.

The tree belongs to the engine's scheduling thread: it has no lock, and worker
threads never see it. ``match_prefix``, ``insert``, ``cache_finished_req`` and
``evict`` are there to be overridden.

The shape of these verbs follows SGLang's RadixCache (``srt/mem_cache``), from
which integrations at this level come.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hicache_core.errors import InvalidArgument
from hicache_engine.allocator import PageAllocator


class Node:
    """A run of pages that are in memory together; compared by identity."""

    __slots__ = ("children", "last_use", "lock_count", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], pages: list[int], last_use: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.lock_count = 0
        self.last_use = last_use


@dataclass(frozen=True, slots=True)
class Match:
    """What of a token sequence is in memory."""

    pages: list[int]
    """Page indices of the leading whole pages."""
    node: Node
    """The last matched node (the root when nothing matched); lock it while its pages are used."""


class FinishedRequest(Protocol):
    """What the cache needs of a request that is done."""

    tokens: Sequence[int]
    extra_key: str | None
    pages: list[int]
    """One page index for each whole page of ``tokens``; shared ones first."""
    node: Node
    """The node that was locked for it."""


class RadixCache:
    """Prefixes in memory; for one thread.

    Args:
        allocator: where pages go back to.
        page_tokens: tokens a page.
        on_evict: called with (tokens from the start, extra_key, the node's pages)
            before these are freed, for write-back; it must be done with them when it returns.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_tokens: int,
        *,
        on_evict: Callable[[tuple[int, ...], str | None, list[int]], None] | None = None,
    ) -> None:
        if page_tokens < 1:
            raise InvalidArgument(
                "page_tokens is not a count", value=repr(page_tokens), remedy="Give 1 or more."
            )
        self.allocator = allocator
        self.page_tokens = page_tokens
        self._on_evict = on_evict
        self._roots: dict[str | None, Node] = {}
        self._uses = 0
        self._total_pages = 0
        self._locked_pages = 0

    # Verbs.

    def match_prefix(self, tokens: Sequence[int], extra_key: str | None = None) -> Match:
        """Find the leading whole pages in memory and count it as a use of them."""
        return self._match(tokens, extra_key)

    def _match(self, tokens: Sequence[int], extra_key: str | None) -> Match:
        """Do what match_prefix says; for the tree's own verbs, whatever a subclass adds to that one."""
        node = self._root(extra_key)
        pages: list[int] = []
        at = 0
        use = self._next_use()
        while (child := self._child(node, tokens, at)) is not None:
            shared = self._shared_pages(child, tokens, at)
            if shared < len(child.pages):
                child = self._split(child, shared)
                child.last_use = use
                return Match(pages + child.pages, child)
            child.last_use = use
            pages += child.pages
            at += len(child.tokens)
            node = child
        return Match(pages, node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], extra_key: str | None = None) -> int:
        """Put a prefix into the tree; return how many of its leading pages the tree had already.

        The tree takes over the pages from there on; the leading ones that differ
        from the tree's own remain the caller's to free.

        Raises:
            InvalidArgument: not exactly one page index for each whole page of tokens.
        """
        whole = len(tokens) // self.page_tokens
        if len(pages) != whole:
            raise InvalidArgument(
                "pages do not fit the tokens",
                value=f"{len(pages)} pages, {len(tokens)} tokens of {self.page_tokens} a page",
                remedy="Pass one page index for each whole page.",
            )
        match = self._match(tokens, extra_key)
        had = len(match.pages)
        if had < whole:
            rest = tuple(tokens[had * self.page_tokens : whole * self.page_tokens])
            node = Node(match.node, rest, list(pages[had:]), self._uses)
            match.node.children[rest[: self.page_tokens]] = node
            self._total_pages += whole - had
        return had

    def cache_finished_req(self, request: FinishedRequest) -> int:
        """Keep a finished request's pages for others and release its lock; return how many the tree had."""
        had = self.insert(request.tokens, request.pages, request.extra_key)
        kept = self._match(request.tokens, request.extra_key).pages
        doubles = [mine for mine, its in zip(request.pages, kept, strict=True) if mine != its]
        self.allocator.give_back(doubles)
        self.unlock(request.node)
        return had

    def evict(self, num_pages: int) -> int:
        """Free at least ``num_pages`` pages, least recently used leaves first; return how many were freed."""
        leaves = [
            (node.last_use, order, node)
            for order, (node, _) in enumerate(self._nodes())
            if not node.children and not node.lock_count
        ]
        heapq.heapify(leaves)
        freed = 0
        order = len(leaves) + self._total_pages
        while leaves and freed < num_pages:
            _, _, leaf = heapq.heappop(leaves)
            freed += self._drop(leaf)
            parent = leaf.parent
            if (
                parent is not None
                and parent.parent is not None
                and not parent.children
                and not parent.lock_count
            ):
                order += 1
                heapq.heappush(leaves, (parent.last_use, order, parent))
        return freed

    # Locks.

    def lock(self, node: Node) -> None:
        """Keep a node and all above it in memory; once for each unlock."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            if not step.lock_count:
                self._locked_pages += len(step.pages)
            step.lock_count += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            if not step.lock_count:
                raise InvalidArgument(
                    "a node was unlocked more often than locked", value=f"{len(step.pages)} pages"
                )
            step.lock_count -= 1
            if not step.lock_count:
                self._locked_pages -= len(step.pages)
            step = step.parent

    # Sizes.

    @property
    def total_pages(self) -> int:
        """Pages in the tree."""
        return self._total_pages

    @property
    def locked_pages(self) -> int:
        """Pages that locks keep."""
        return self._locked_pages

    @property
    def evictable_pages(self) -> int:
        """Pages that evict could free."""
        return self._total_pages - self._locked_pages

    def reset(self) -> None:
        """Forget everything and free its pages, without write-back.

        Raises:
            InvalidArgument: some node is locked; nothing was freed.
        """
        if self._locked_pages:
            raise InvalidArgument(
                "the tree is in use",
                value=f"{self._locked_pages} locked pages",
                remedy="Finish the requests first.",
            )
        for node, _ in self._nodes():
            self.allocator.give_back(node.pages)
        self._roots.clear()
        self._total_pages = 0

    # Inside.

    def _root(self, extra_key: str | None) -> Node:
        root = self._roots.get(extra_key)
        if root is None:
            root = self._roots[extra_key] = Node(None, (), [], 0)
        return root

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _child(self, node: Node, tokens: Sequence[int], at: int) -> Node | None:
        return node.children.get(tuple(tokens[at : at + self.page_tokens]))

    def _shared_pages(self, node: Node, tokens: Sequence[int], at: int) -> int:
        """Count the node's leading pages that equal the tokens from ``at``; the first one is known to."""
        size = self.page_tokens
        there = tuple(tokens[at : at + len(node.tokens)])
        if there == node.tokens:
            return len(node.pages)
        shared = 1
        while there[shared * size : (shared + 1) * size] == node.tokens[shared * size : (shared + 1) * size]:
            if len(there) < (shared + 1) * size:
                break
            shared += 1
        return shared

    def _split(self, node: Node, pages: int) -> Node:
        """Part a node after ``pages`` pages and return the new upper half."""
        parent = node.parent
        if parent is None:
            raise InvalidArgument("the root cannot be split")
        at = pages * self.page_tokens
        upper = Node(parent, node.tokens[:at], node.pages[:pages], node.last_use)
        upper.lock_count = node.lock_count
        upper.children[node.tokens[at : at + self.page_tokens]] = node
        parent.children[node.tokens[: self.page_tokens]] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[at:], node.pages[pages:]
        return upper

    def _drop(self, leaf: Node) -> int:
        parent = leaf.parent
        if parent is None:
            return 0
        if self._on_evict is not None:
            tokens, extra_key = self._path(leaf)
            self._on_evict(tokens, extra_key, leaf.pages)
        del parent.children[leaf.tokens[: self.page_tokens]]
        if parent.parent is None and not parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not parent}
        self.allocator.give_back(leaf.pages)
        self._total_pages -= len(leaf.pages)
        return len(leaf.pages)

    def _path(self, node: Node) -> tuple[tuple[int, ...], str | None]:
        """Give all tokens from the start to the node's end, and the root's key."""
        parts: list[tuple[int, ...]] = []
        step = node
        while step.parent is not None:
            parts.append(step.tokens)
            step = step.parent
        key = next(key for key, root in self._roots.items() if root is step)
        return tuple(token for part in reversed(parts) for token in part), key

    def _nodes(self) -> Iterator[tuple[Node, str | None]]:
        for key, root in list(self._roots.items()):
            waiting = list(root.children.values())
            while waiting:
                node = waiting.pop()
                waiting.extend(node.children.values())
                yield node, key

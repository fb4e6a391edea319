"""LayerStore: an engine's KV, layer by layer, in LMCache.

What LMCache's LayerwiseConnector does, on the same LMCacheEngine (engines.py),
with differences that a cache for production needs:

- Generators run to their end, or are given up; references and pins never stay.
- A load is one only if LMCache brought every chunk of every layer that it had
  promised. It says nothing where it brings fewer, and the slots keep what was
  in them before.
- Pins are taken for whole chunks only: LMCache's lookup also pins the layers of a
  chunk that lacks others, and forgets that it did.
- A chunk of which only some layers are left is removed, or LMCache, which looks
  at the first layer, would never store it again.
- What was stored is asked for afterwards, since LMCache does not tell.

Facts: lmcache 0.5.6, ``integration/sglang/sglang_adapter.py``,
``v1/cache_engine.py`` (retrieve_layer, store_layer, lookup),
``v1/gpu_connector/gpu_connectors.py`` (SGLangLayerwiseGPUConnector).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hicache_core.errors import BackendUnavailable, InvalidPages
from hicache_lmcache.engines import SharedEngine, free_orphans, leave, load

#: The longest wait for a layer that is not wanted any more.
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class LayerPools:
    """One tensor a layer and half, each of whole rows; row ``slot * rows_per_slot`` is a token's.

    LMCache's layer-wise connector knows K and V of one shape and no MLA. A latent
    row is therefore told as two: its first half as K, its second as V, which is
    the same memory with twice the rows.
    """

    keys: list[Any]
    values: list[Any]
    rows_per_slot: int

    @classmethod
    def of_mha(cls, keys: Sequence[Any], values: Sequence[Any]) -> LayerPools:
        """Take K and V, a tensor (slots, heads, head_dim) a layer each."""
        shapes = {tuple(layer.shape) for layer in (*keys, *values)}
        if len(keys) != len(values) or len(shapes) != 1:
            raise InvalidPages(
                "K and V cannot be stored layer by layer",
                value=f"{len(keys)} and {len(values)} layers, shapes {sorted(shapes)}",
                remedy="Pass as many layers of K as of V, all of one shape.",
            )
        return cls(list(keys), list(values), 1)

    @classmethod
    def of_mla(cls, latents: Sequence[Any]) -> LayerPools:
        """Take the latents, a contiguous tensor (slots, 1, width) a layer, of an even width."""
        if not latents or any(not layer.is_contiguous() or layer.shape[-1] % 2 for layer in latents):
            raise InvalidPages(
                "the latents cannot be stored layer by layer",
                value=f"shapes {[tuple(layer.shape) for layer in latents[:4]]}",
                remedy="Pass contiguous tensors (slots, 1, width) of an even width.",
            )
        halves = [layer.view(layer.shape[0] * 2, 1, layer.shape[-1] // 2) for layer in latents]
        return cls([rows[:-1] for rows in halves], [rows[1:] for rows in halves], 2)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.keys)


class Loading:
    """One prefix on its way out of LMCache; for one thread at a time."""

    def __init__(
        self, store: LayerStore, generator: Any, lookup_id: str, num_tokens: int, offset: int
    ) -> None:
        #: Tokens of the prefix that LMCache holds, as far as they were asked for.
        self.num_tokens = num_tokens
        self.layers_done = 0
        #: It touches no memory any more, and holds nothing of LMCache's.
        self.ended = False
        self._store = store
        self._generator = generator
        self._lookup_id = lookup_id
        self._wanted = num_tokens - offset
        self._held: list[Any] = []

    def step(self) -> None:
        """Load the next layer; after the last one let go of everything.

        Raises: BackendUnavailable: LMCache brought less than it had promised; whatever LMCache raised.
        """
        with self._store.native:
            coming = None  # what was asked of a store, and may hold references that nobody has counted
            try:
                if not self.layers_done:
                    promised = next(self._generator)
                    self._held, coming = self._local("to_count_down", []), self._local("task", None)
                    self._is_whole("tokens", 0 if promised is None else int(promised), self._wanted)
                arriving = coming = self._local("task", None)
                next(self._generator)
                last = self.layers_done + 1 == self._store.pools.num_layers
                if last:  # LMCache has given everything back
                    self._held, coming = [], None
                else:
                    coming = self._local("task", None)
                brought = arriving.result(_SETTLE_S) if arriving is not None else ()
                self._is_whole("chunks", len(brought), self._wanted // self._store.chunk_tokens)
                self.layers_done += 1
                if last:
                    self._let_go(coming)
            except BaseException:
                self._let_go(coming)
                raise

    def abandon(self) -> None:
        """Load no further layer and let go of everything."""
        with self._store.native:
            if not self.ended:
                self._let_go(self._local("task", None) if self.layers_done else None)

    def _is_whole(self, what: str, brought: int, wanted: int) -> None:
        if brought != wanted:
            raise BackendUnavailable(
                f"loading layer {self.layers_done} from LMCache", value=f"{brought} {what} of {wanted} came"
            )

    def _local(self, name: str, default: Any) -> Any:
        """Look at a variable of LMCache's generator: what it must give back is known nowhere else."""
        frame = self._generator.gi_frame
        while frame is not None and name not in frame.f_locals:
            inner = frame.f_locals.get("gen")  # torch's inference_mode wraps generators in one of its own
            frame = getattr(inner, "gi_frame", None)
        return default if frame is None else frame.f_locals[name]

    def _let_go(self, coming: Any) -> None:
        """Do what LMCache does at the end of a load, which it reaches for no SGLang connector (it raises
        StopIteration there), and for none that failed or was given up.

        Pins are the lookup's alone: to undo one for each object, as LMCache does for those that its local
        disk pinned, would undo another load's.
        """
        self.ended = True
        self._generator.close()
        held = list(self._held)
        if coming is not None:  # asked of its store already, for the next layer
            held += [
                memory for memory in _arrived(coming) if not any(memory is other for other in self._held)
            ]
        for memory in held:
            memory.ref_count_down()
        self._held = []
        self._store.unpin(self._lookup_id)


def _arrived(coming: Any) -> list[Any]:
    try:
        return [memory for memory in coming.result(_SETTLE_S) if memory is not None]
    except Exception:  # noqa: BLE001 - whatever LMCache's stores raise: then nothing arrived
        return []


class LayerStore:
    """One instance's view of an LMCache engine; made by ``open_layers`` (opening.py)."""

    def __init__(self, pools: LayerPools, shared: SharedEngine) -> None:
        self.pools = pools
        self.chunk_tokens = shared.key.chunk_tokens
        self.native = shared.native
        self._torch = load("torch")
        self._shared = shared
        self._tables = shared.make_tables()

    def begin_load(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        offset: int,
        extra_key: str | None = None,
        lowest_common: Callable[[int], int] = int,
    ) -> Loading | None:
        """Look a prefix up, pin it and prepare its load; None where LMCache has nothing beyond ``offset``.

        Args:
            slots: one a token; negative ones are left out (they are there already).
            offset: tokens of whole chunks at the start that are not wanted.
            extra_key: the prefix is another one under another key.
            lowest_common: what all tensor-parallel ranks hold, from what this one does.
        """
        engine, lookup_id = self._shared.engine, f"hicache-{uuid.uuid4()}"
        with self.native:
            free_orphans()
            ids, tags = self._tensor(tokens), _tags(extra_key)
            held = int(engine.lookup(ids, request_configs=tags))
            found = lowest_common(held) // self.chunk_tokens * self.chunk_tokens
            if found <= offset:
                return None
            try:
                pinned = engine.lookup(ids[:found], lookup_id=lookup_id, pin=True, request_configs=tags)
                if int(pinned) != found:
                    raise BackendUnavailable("looking a prefix up in LMCache", value=f"{pinned}, was {found}")
                mask = self._torch.ones(found, dtype=self._torch.bool)
                mask[:offset] = False
                engine.gpu_connector = self._tables
                generator = engine.retrieve_layer(
                    ids[:found],
                    mask=mask,
                    slot_mapping=self._rows(slots[:found]),
                    offset=offset,
                    request_configs=tags,
                    **self._memory(),
                )
                return Loading(self, generator, lookup_id, found, offset)
            except BaseException:
                self.unpin(lookup_id)
                raise

    def store(self, tokens: Sequence[int], slots: Sequence[int], extra_key: str | None = None) -> int:
        """Store the whole chunks of a prefix that LMCache lacks; give how many tokens of it LMCache holds.

        Raises: whatever LMCache raised.
        """
        engine, tags = self._shared.engine, _tags(extra_key)
        with self.native:
            free_orphans()
            engine.gpu_connector = self._tables
            ids = self._tensor(tokens)
            mask = self._torch.ones_like(ids, dtype=self._torch.bool)
            layers = engine.store_layer(
                ids,
                mask=mask,
                slot_mapping=self._rows(slots),
                offset=0,
                request_configs=tags,
                **self._memory(),
            )
            held = 0
            try:
                for _ in layers:
                    pass
                held = int(engine.lookup(ids, request_configs=tags))
                return held
            finally:
                if held < len(tokens):
                    self._remove_halves(ids, tags)

    def forget(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Remove a prefix's chunks from all of LMCache's stores."""
        with self.native:
            for layers in self._chunks(self._tensor(tokens), _tags(extra_key)):
                for key in layers:
                    self._shared.engine.storage_manager.remove(key)

    def unpin(self, lookup_id: str) -> None:
        """Undo a lookup's pins; ``native`` is held."""
        self._shared.engine.lookup_unpin(lookup_id)

    @property
    def pinned(self) -> int:
        """Lookups whose pins are held."""
        return len(self._shared.engine.lookup_pins)

    def clear(self) -> None:
        """Forget everything, of all instances that share the engine."""
        with self.native:
            self._shared.engine.clear()

    def close(self) -> None:
        """Leave the engine; the last one to leave ends it."""
        leave(self._shared)

    def _chunks(self, ids: Any, tags: dict[str, str]) -> Iterator[list[Any]]:
        """Give each whole chunk's keys, one a layer."""
        engine = self._shared.engine
        for _, _, key in engine.token_database.process_tokens(tokens=ids, request_configs=tags):
            yield key.split_layers(self.pools.num_layers)

    def _remove_halves(self, ids: Any, tags: dict[str, str]) -> None:
        stores = self._shared.engine.storage_manager
        for layers in self._chunks(ids, tags):
            there = [key for key in layers if stores.contains(key)]
            if len(there) < len(layers):
                for key in there:
                    stores.remove(key)

    def _memory(self) -> dict[str, Any]:
        return {"kvcaches": [self.pools.keys, self.pools.values], "sync": False}

    def _tensor(self, tokens: Sequence[int]) -> Any:
        return self._torch.tensor(list(tokens), dtype=self._torch.int64)

    def _rows(self, slots: Sequence[int]) -> Any:
        device = self.pools.keys[0].device
        rows = self._torch.tensor(list(slots), dtype=self._torch.int64, device=device)
        return rows * self.pools.rows_per_slot


def _tags(extra_key: str | None) -> dict[str, str]:
    """Put an extra key into LMCache's keys, as a digest: it takes neither ``@`` nor ``%``."""
    if extra_key is None:
        return {}
    return {"lmcache.tag.extra": hashlib.sha256(extra_key.encode()).hexdigest()[:32]}

"""HiCacheTier: a secondary tier of vLLM's KV offloading over any hicache backend.

The order of things in vLLM (0.24 to 0.33): the tiering spec maps the host tier, a
table of rows, and constructs its secondary tiers over it in the scheduler's
process. Every step the scheduler looks keys up, submits loads of what was found and
stores of what was computed, and collects finished jobs; when it is told to reset
its cache it drains them. All calls come from one thread, or under one lock.

A request waits until its load has ended, and rows belong to a job until then. So
nothing here may block, every job ends, and a failed load is a miss from then on:
vLLM would promote the same pages for ever. vLLM checks no bytes; what it is given as
loaded is the whole page, as it was stored, or the job says which pages are not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.base import RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from hicache_core import HiCache, HostPool
from hicache_core.errors import InvalidOptions
from hicache_core.guard import GRACE_S
from hicache_core.notices import Notices
from hicache_vllm import lora, watch
from hicache_vllm.identity import draft_model_of, identity_of, placement_of
from hicache_vllm.jobs import Jobs
from hicache_vllm.layout import pools_over, read_layout, split_key
from hicache_vllm.lookups import Lookups
from hicache_vllm.plugin import config_of
from hicache_vllm.release import hash_seed_constant, platform_name, version
from hicache_vllm.results import fields_of_result, result_of, verdicts
from hicache_vllm.settings import Settings, read_settings
from hicache_vllm.stats import StatsFeed, definitions

_log = logging.getLogger("hicache")

#: vLLM's core steps without a pause while all its requests wait for loads. Each time that a thread of ours
#: comes back from the store it needs the interpreter's lock, for which it would wait 5 ms
#: (sys.getswitchinterval); a pause this short a step hands it over.
_YIELD_S = 50e-6


class HiCacheTier(SecondaryTierManager):  # type: ignore[misc]
    """Any hicache backend behind an unmodified vLLM; made by vLLM's own factory from the type ``hicache``.

    Threads: as vLLM promises, one call at a time; transfers and lookups run on threads of their own.
    """

    #: What vLLM counts hits as (0.26 on); earlier releases have no such thing.
    medium = getattr(getattr(offload, "Medium", None), "STORAGE", None)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **entry: Any,
    ) -> None:
        """Validate the entry and open the store; one that cannot be reached is tried again later.

        Args:
            entry: the tier's keys in ``secondary_tiers``, and whatever else a release passes.

        Raises:
            InvalidOptions, BackendLoadError, InvalidPages: vLLM does not start, and says why.
        """
        more = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        self._set_locality(entry.get("locality"))
        self._settings: Settings = read_settings(entry)
        self._backend = self._settings.backend
        self._notices = Notices()
        self._verdicts = verdicts()
        self._result_fields = fields_of_result()
        #: Why pages are neither given nor taken; empty while they are. Read without a lock by every call.
        self._off = ""
        self._ended = False
        self._cache, self._pools = self._open(offloading_spec, primary_kv_view)
        self._row_nbytes = primary_kv_view.strides[0] if primary_kv_view.strides else 0
        patience_s = self._settings.timeout_s + GRACE_S
        self._jobs = Jobs(
            self._settings.load_threads,
            self._settings.store_threads,
            self._note_error,
            f"hicache-{tier_type}",
            stuck_s=2 * patience_s,
        )
        self._lookups = Lookups(
            tier_type, self._contains, patience_s=patience_s, on_late=self._note_late_lookup
        )
        self._feed = StatsFeed(self._backend)
        if not watch.listen(self):
            _log.warning("hicache: cannot hear of weights replaced in this vLLM; restart after it")

    def _open(self, spec: Any, view: memoryview) -> tuple[HiCache, dict[int, HostPool]]:
        settings = self._settings
        config = config_of(spec)
        if config is None:
            complaint = (
                "the plugin 'hicache' was not loaded, so it is not known what the pages mean; "
                "add it to VLLM_PLUGINS, or unset VLLM_PLUGINS"
            )
            raise InvalidOptions("vllm", [("VLLM_PLUGINS", complaint, "")])
        if getattr(config, "lora_config", None) is not None and not lora.hash_by_content():
            complaint = (
                "this vLLM does not let adapters be told apart by their content; serve without LoRA, "
                "or use a release from 0.24 to 0.33"
            )
            raise InvalidOptions("vllm", [("enable_lora", complaint, "")])
        platform = platform_name()
        layout = read_layout(spec, config, release=version(), platform=platform)
        identity = identity_of(config, layout, settings, seed_constant=hash_seed_constant())
        row_nbytes = view.strides[0] if view.strides else 0
        components = layout.components(row_nbytes, draft_model_of(config))
        pools = dict(zip(components, pools_over(view, components.values()), strict=True))
        cache = HiCache.open(
            settings.backend,
            identity=identity,
            placement=placement_of(config, platform),
            pools=list(pools.values()),
            timeout_s=settings.timeout_s,
            options=settings.options | ({"bounce": True} if settings.bounce else {}),
        )
        _log.info(
            "hicache '%s': %d rows of %d bytes, namespace %s",
            settings.backend,
            view.shape[0] if view.shape else 0,
            row_nbytes,
            cache.namespace,
        )
        return cache, pools

    # Lookups.

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Tell whether a page can be loaded, or that this is being asked."""
        if self._off or self._jobs.loads_stuck:
            return self._verdicts[False]
        return self._verdicts[self._lookups.verdict(key, req_context)]

    def on_new_request(self, req_context: Any) -> Any:
        """Offload chunks as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what the request asked for."""
        self._lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: Any = None) -> None:
        """Ask for what this step looked up, and let the threads that a request waits for run."""
        self._lookups.flush()
        if self._lookups.take_unsure() or self._jobs.loading:
            time.sleep(_YIELD_S)

    # Transfers.

    def submit_store(self, job_metadata: Any) -> None:
        """Store rows on a thread; vLLM pins them until the job is collected."""
        self._submit(job_metadata, loads=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Load rows on a thread; they are this job's alone until it is collected."""
        self._submit(job_metadata, loads=True)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Collect what has ended; pages that could not be loaded are misses from here on."""
        results = []
        for outcome in self._jobs.finished():
            if outcome.loads:
                failed = [key for key, good in zip(outcome.keys, outcome.good, strict=True) if not good]
                if failed:
                    self._lookups.mark_miss(failed)
            results.append(result_of(outcome, self._row_nbytes, self._result_fields))
        return results

    def has_pending_work(self) -> bool:
        """Have the engine step on while a job has not been collected."""
        return self._jobs.pending

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Nothing: an OK get or set is a use already, and vLLM touches what its own tiers hold."""

    def drain_jobs(self) -> None:
        """Wait until no transfer touches a row; one that hangs in native code blocks, as vLLM wants it."""
        while not self._jobs.drain(self._settings.timeout_s + GRACE_S):
            self._notices.warn(
                f"hicache '{self._backend}'", "drain", "transfers are late; their rows cannot be reused yet"
            )

    def shutdown(self) -> None:
        """Close the store and end the threads, within twice timeout_s and 4 s; idempotent.

        Raises:
            RuntimeError: a transfer still touches rows, so vLLM must not unmap them.
        """
        watch.forget(self)
        if self._ended:
            return
        self._ended = True
        drained = self._jobs.drain(self._settings.timeout_s + GRACE_S)
        self._off = self._off or "shut down"
        self._cache.close()
        self._lookups.stop(GRACE_S)
        self._jobs.stop(GRACE_S)
        if not drained and not self._jobs.drain(0.0):
            raise RuntimeError(
                f"hicache '{self._backend}': a transfer hangs and may still write; "
                'set "bounce": true in the tier\'s entry to have such calls left behind safely'
            )

    # Stats.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Describe what ``get_stats`` gives."""
        return definitions()

    def get_stats(self) -> Any:
        """Give what happened since the last call as vLLM's stats; None where nothing did."""
        return self._feed.take(self._cache.stats(), self.tier_type)

    # Told by watch.py.

    def weights_changing(self, what: str) -> None:
        """Neither give nor take pages any more: what they would be of is not known."""
        if not self._off:
            _log.warning(
                "hicache '%s' is off until the engine starts anew: %s may replace weights",
                self._backend,
                what,
            )
        self._off = f"{what} may have replaced weights"

    # For tools.

    @property
    def cache(self) -> HiCache:
        """The HiCache behind this."""
        return self._cache

    # What runs on other threads.

    def _submit(self, job: Any, *, loads: bool) -> None:
        keys = list(job.keys)
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        rows = [int(row) for row in rows]
        self._jobs.submit(job.job_id, loads=loads, keys=keys, move=lambda: self._move(keys, rows, loads))

    def _move(self, keys: Sequence[bytes], rows: Sequence[int], loads: bool) -> list[bool]:
        """Move a job's pages, one call a group."""
        good = [False] * len(keys)
        if self._off:
            return good
        verb = self._cache.get if loads else self._cache.set
        for number, positions, hashes in self._by_group(keys):
            pages = self._pools[number].pages([rows[position] for position in positions])
            for position, status in zip(positions, verb(hashes, pages), strict=True):
                good[position] = bool(status)
        return good

    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Answer on the lookup thread; never raises."""
        found = [False] * len(keys)
        try:
            for number, positions, hashes in self._by_group(keys):
                statuses = self._cache.contains(hashes, self._pools[number].component.name)
                for position, status in zip(positions, statuses, strict=True):
                    found[position] = bool(status)
        except Exception as error:  # noqa: BLE001 - without an answer the request would wait
            self._note_error(error)
        return found

    def _by_group(self, keys: Sequence[bytes]) -> list[tuple[int, list[int], list[str]]]:
        """Sort keys by cache group: number, positions in the batch, page hashes."""
        groups: dict[int, tuple[list[int], list[str]]] = {}
        for position, key in enumerate(keys):
            page_hash, number = split_key(key)
            positions, hashes = groups.setdefault(number, ([], []))
            positions.append(position)
            hashes.append(page_hash)
        return [(number, positions, hashes) for number, (positions, hashes) in groups.items()]

    def _note_error(self, error: BaseException) -> None:
        self._notices.warn(f"hicache '{self._backend}'", type(error).__name__, repr(error))

    def _note_late_lookup(self) -> None:
        self._notices.warn(
            f"hicache '{self._backend}'", "lookup", "no answer in time, which counts as a miss"
        )

    def _set_locality(self, locality: Any) -> None:
        kind = getattr(offload, "Locality", None)
        if locality is not None and kind is not None:
            self.locality = kind(locality)

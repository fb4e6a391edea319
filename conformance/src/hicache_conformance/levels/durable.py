"""Level durable: what was OK is there after close, after kill -9, after a restart (C14)."""

from __future__ import annotations

import pytest

from hicache_conformance.bench import Bench, aligned
from hicache_conformance.levels.shared import LARGE_NBYTES, killed_in_a_set
from hicache_core import Status

OK, MISS = Status.OK, Status.MISS


class DurableLevel:
    """Cases of level durable."""

    @pytest.mark.clause("C14")
    @pytest.mark.needs("persistent")
    def test_c14_pages_are_there_after_close_and_restart(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(100)
        bench.stored(storage, keys)
        storage.close()
        _restart(bench)
        again = bench.open()
        assert bench.contains(again, keys) == [OK] * 100
        assert bench.versions(again, keys) == [0] * 100
        assert again.usage().pages == 100

    @pytest.mark.clause("C14")
    @pytest.mark.needs("persistent")
    def test_c14_several_rounds_of_close_and_restart_add_up(self, bench: Bench) -> None:
        keys = bench.keys(20)
        for round_ in range(4):
            storage = bench.open()
            bench.stored(storage, keys[: 5 * (round_ + 1)], version=round_)
            storage.close()
            _restart(bench)
        assert bench.versions(bench.open(), keys) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5

    @pytest.mark.clause("C14")
    @pytest.mark.needs("persistent")
    @pytest.mark.faults("second_process")
    def test_c14_pages_are_there_for_a_later_process(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(10)
        bench.stored(storage, keys)
        storage.close()
        peer = bench.peer(bench.component())
        assert peer.ask("get", keys=keys) == [["OK", 0]] * 10

    @pytest.mark.clause("C14", "C13")
    @pytest.mark.needs("persistent", "remove")
    def test_c14_removed_pages_stay_removed(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(6)
        bench.stored(storage, keys)
        assert aligned(storage.batch_remove(keys[::2]), 3) == [OK] * 3
        storage.close()
        _restart(bench)
        assert bench.versions(bench.open(), keys) == [MISS, 0] * 3

    @pytest.mark.clause("C14", "C9")
    @pytest.mark.needs("persistent", "clear")
    def test_c14_cleared_pages_stay_cleared(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(6)
        bench.stored(storage, keys)
        storage.clear()
        bench.stored(storage, keys[:1], version=1)
        storage.close()
        _restart(bench)
        assert bench.versions(bench.open(), keys) == [1] + [MISS] * 5

    @pytest.mark.clause("C14", "C4")
    @pytest.mark.needs("persistent")
    def test_c14_a_page_set_again_after_a_restart_is_unchanged(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(3)
        bench.stored(storage, keys)
        storage.close()
        _restart(bench)
        again = bench.open()
        bench.stored(again, keys, version=1)
        assert bench.versions(again, keys) == [0] * 3

    @pytest.mark.clause("C14")
    @pytest.mark.needs("durable")
    @pytest.mark.faults("second_process")
    def test_c14_pages_of_a_killed_process_are_there(self, bench: Bench) -> None:
        keys = bench.keys(50)
        peer = bench.peer(bench.component())
        assert peer.ask("set", keys=keys) == ["OK"] * 50
        peer.kill()
        assert bench.versions(bench.open(), keys) == [0] * 50

    @pytest.mark.clause("C14", "C4")
    @pytest.mark.needs("durable")
    @pytest.mark.faults("second_process")
    @pytest.mark.parametrize("round_", range(4))
    def test_c14_a_kill_in_a_set_loses_no_ok_page_and_damages_none(self, bench: Bench, round_: int) -> None:
        component = bench.component(LARGE_NBYTES)
        keys, kept = killed_in_a_set(bench, component, f"durable-{round_}-")
        storage = bench.open()
        for start in range(0, len(kept), 64):
            chunk = kept[start : start + 64]
            assert bench.versions(storage, chunk, LARGE_NBYTES) == [0] * len(chunk)
        rest = [key for key in keys if key not in set(kept)]
        assert set(bench.versions(storage, rest, LARGE_NBYTES)) <= {0, MISS}
        bench.stored(storage, rest, LARGE_NBYTES)
        assert bench.versions(storage, rest, LARGE_NBYTES) == [0] * len(rest)

    @pytest.mark.clause("C14")
    @pytest.mark.needs("durable")
    @pytest.mark.faults("kill", "restart")
    def test_c14_pages_are_there_after_the_server_was_killed(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(100)
        bench.stored(storage, keys)
        bench.kill()
        bench.restart()
        assert bench.versions(bench.open(), keys) == [0] * 100

    @pytest.mark.clause("C14", "C13")
    @pytest.mark.needs("durable", "remove")
    @pytest.mark.faults("kill", "restart")
    def test_c14_removed_pages_do_not_come_back_when_the_server_was_killed(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(4)
        bench.stored(storage, keys)
        assert aligned(storage.batch_remove(keys[:2]), 2) == [OK, OK]
        bench.kill()
        bench.restart()
        assert bench.versions(bench.open(), keys) == [MISS, MISS, 0, 0]


def _restart(bench: Bench) -> None:
    """Restart the server where there is one; a store without one is restarted by the next open."""
    if "restart" in bench.harness.faults:
        bench.restart()

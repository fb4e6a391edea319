"""The supervisor survives what it runs: hangs, crashes, floods, and servers left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hicache_conformance.calls import until
from hicache_conformance.report import Report, headline
from hicache_conformance.runner import Plan, run


def _survived(mutant: str, *, match: str, **changes: float) -> Report:
    limits: dict[str, float] = {"budget_s": 60.0, "case_budget_s": 3.0} | changes
    return run(Plan(subject=f"mutant={mutant}", levels=["core"], match=match, seed=1, **limits))  # type: ignore[arg-type]


def _outcomes(report: Report) -> list[tuple[str, str]]:
    return [(result.case.id, result.outcome) for result in report.results]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["hangs_for_ever", "hangs_holding_the_gil"])
def test_isolation_a_call_that_hangs_fails_its_case_and_the_next_one_runs(mutant: str) -> None:
    report = _survived(mutant, match="ten_gets or touch or usage")
    assert _outcomes(report) == [
        ("test_c13_usage_counts_the_pages_of_the_namespace", "pass"),
        ("test_c13_touch_gives_nothing_and_changes_no_page", "fail"),
        ("test_c3_ten_gets_of_one_page_give_it_each_time", "fail"),
    ]
    assert report.results[1].detail.startswith("still running after ")
    assert "in batch_get" in report.results[1].detail
    assert report.exit_status == 1


def test_isolation_a_crash_fails_its_case_and_the_next_one_runs() -> None:
    report = _survived("crashes", match="ten_gets or usage or contains_is_ok")
    assert _outcomes(report) == [
        ("test_c6_contains_is_ok_after_set_and_moves_no_bytes", "pass"),
        ("test_c13_usage_counts_the_pages_of_the_namespace", "pass"),
        ("test_c3_ten_gets_of_one_page_give_it_each_time", "fail"),
    ]
    assert report.results[2].detail.startswith("its process died of SIGSEGV")
    assert headline(report.results[2].detail) == "its process died of SIGSEGV"


def test_isolation_an_exit_in_a_call_fails_its_case() -> None:
    report = _survived("exits", match="ten_gets or usage")
    assert [outcome for _, outcome in _outcomes(report)] == ["pass", "fail"]
    assert report.results[1].detail.startswith("its process ended with status 0")


def test_isolation_a_flood_of_output_is_read_and_thrown_away() -> None:
    report = run(Plan(subject="mutant=floods_stdout", levels=["lifecycle"], match="c16 or closed", seed=1))
    outcomes = dict(_outcomes(report))
    flooded = "test_c16_no_process_state_is_changed_and_nothing_is_printed"
    assert outcomes.pop(flooded) == "fail"
    assert set(outcomes.values()) == {"pass"}


def test_isolation_the_budget_ends_a_run_and_the_rest_is_not_run() -> None:
    started = time.monotonic()
    report = _survived("hangs_for_ever", match="test_c3 or test_c6", budget_s=15.0, case_budget_s=60.0)
    assert time.monotonic() - started < 40
    outcomes = [outcome for _, outcome in _outcomes(report)]
    assert outcomes[0] == "fail"
    assert set(outcomes[1:]) == {"not-run"}
    assert report.results[-1].detail == "the budget of 15 s was spent"
    assert report.verdict("core") == "not reached"


@pytest.mark.slow
def test_isolation_gives_up_after_four_lost_processes() -> None:
    report = _survived("exits", match="set_then_get or c5_value or c4_a_value")
    outcomes = [outcome for _, outcome in _outcomes(report)]
    assert outcomes == ["fail"] * 4 + ["not-run"] * 5
    assert "4 cases before it" in report.results[-1].detail


def test_isolation_leaves_no_server_and_no_folder_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="hc-") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        report = _survived("crashes", match="ten_gets")
        assert _outcomes(report) == [("test_c3_ten_gets_of_one_page_give_it_each_time", "fail")]
        assert os.listdir(place) == []
        assert until(lambda: _processes_that_name(place) == [])


def test_isolation_a_killed_supervisor_takes_its_hanging_child_along() -> None:
    command = [sys.executable, "-m", "hicache_conformance", "--subject", "mutant=hangs_holding_the_gil"]
    command += ["--level", "core", "--match", "ten_gets"]
    with subprocess.Popen(command) as supervisor:
        # The one with a server is the suite's; others come and go: platform.platform asks `uname -p`.
        assert until(lambda: bool(_with_servers(supervisor.pid)))
        ((child, server),) = _with_servers(supervisor.pid)
        supervisor.kill()
    assert until(lambda: not {_state(child), _state(server)} - {"Z"})


def _with_servers(supervisor: int) -> list[tuple[int, int]]:
    """Give each child that has a child of its own, with that one."""
    return [(child, server) for child in _children_of(supervisor) for server in _children_of(child)]


def _children_of(parent: int) -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _parent(int(p.name)) == parent]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _processes_that_name(place: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if place.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found

from __future__ import annotations

import os
from collections import Counter

import pytest

from hicache_cli.benchreport import Cell, Spread
from hicache_cli.contestants import Memcpy, Plan, RawFile, _rest, options_of
from hicache_cli.measure import Series, Span, measure
from hicache_cli.player import Slots
from hicache_core import HiCacheError

SMALL = ("--page-bytes", "1kib", "--batch", "4", "--total", "32kib", "--rounds", "2")


def a_plan(**changes) -> Plan:
    shape = {"page_nbytes": 256, "batch": 3, "batches": 2, "threads": 1, "processes": 1, "rounds": 2}
    return Plan(**(shape | changes))


class Recorder:
    """A correct contestant in memory that writes down what it was asked."""

    def __init__(self, name, log, store, slots_bug=None):
        self.name, self.log, self.store, self.troubles = name, log, store, Counter()
        self.bug = slots_bug or (lambda hashes, page: page)

    def make(self):
        return self

    def open(self, plan, slots):
        self.log.append((self.name, "open"))

    def set(self, thread, number, hashes, locs):
        self.log.append((self.name, "set"))
        self.store.update({h: bytes(locs.views(i)[0]) for i, h in enumerate(hashes)})

    def get(self, thread, number, hashes, locs):
        self.log.append((self.name, "get"))
        for i, page_hash in enumerate(hashes):
            locs.views(i)[0][:] = self.bug(hashes, self.store[page_hash])

    def forget(self):
        self.log.append((self.name, "forget"))
        self.store.clear()

    def close(self):
        self.log.append((self.name, "close"))


def test_the_order_rotates_and_each_round_is_forgotten():
    log = []
    measure(a_plan(batches=1), [Recorder(n, log, {}) for n in "abc"], lambda: None)
    assert log[:3] == [("a", "open"), ("b", "open"), ("c", "open")]
    assert log[-3:] == [("a", "close"), ("b", "close"), ("c", "close")]
    assert [name for name, what in log if what == "set"] == list("abcbcacab")
    assert [what for name, what in log if name == "b"] == ["open", *["set", "get", "forget"] * 3, "close"]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_round_is_verified_and_does_not_count(threads):
    series = measure(a_plan(threads=threads), [Recorder("a", [], {})], lambda: None)["a"]
    assert [len(span.calls) for span in series.spans["set"]] == [2 * threads] * 2
    assert [len(span.calls) for span in series.spans["get"]] == [2 * threads] * 2
    assert series.wrong == 0


def test_wrong_bytes_are_counted_in_every_round_s_check():
    def flipped(hashes, page):
        return bytes([*page[:100], page[100] ^ 1, *page[101:]])

    series = measure(a_plan(), [Recorder("a", [], {}, flipped)], lambda: None)["a"]
    assert series.wrong == 2 * 3 + 2 * 3  # every batch of the first round, the last one of the two others


def test_a_page_of_another_batch_is_wrong_in_the_first_round():
    store = {}

    class Shifted(Recorder):
        def get(self, thread, number, hashes, locs):
            other = list(store)[:3]
            super().get(thread, number, other, locs)

    series = measure(a_plan(rounds=1), [Shifted("a", [], store)], lambda: None)["a"]
    assert series.wrong == 3


def test_what_a_contestant_raises_is_raised_and_all_are_closed():
    class Failing(Recorder):
        def get(self, thread, number, hashes, locs):
            raise ValueError("no")

    log = []
    with pytest.raises(ValueError, match="no"):
        measure(a_plan(threads=2), [Recorder("a", log, {}), Failing("b", log, {})], lambda: None)
    assert log[-2:] == [("a", "close"), ("b", "close")]


@pytest.mark.parametrize("kind", ["memcpy", "raw"])
def test_memcpy_and_the_raw_file_give_back_what_they_took(kind, tmp_path):
    plan = a_plan(page_nbytes=64, batch=1100, threads=2)
    slots = [Slots(64, 1100) for _ in range(2)]
    contestant = Memcpy() if kind == "memcpy" else RawFile(str(tmp_path))
    contestant.open(plan, slots)
    contents = {(thread, number): os.urandom(64 * 1100) for thread in range(2) for number in range(2)}
    for thread in range(2):
        for number in range(2):
            slots[thread].memory[:] = contents[thread, number]
            contestant.set(thread, number, [], slots[thread].all)
    for thread in (1, 0):
        for number in (1, 0):
            slots[thread].wipe(1100)
            contestant.get(thread, number, [], slots[thread].all)
            assert slots[thread].memory == contents[thread, number]
    contestant.close()
    assert list(tmp_path.iterdir()) == []


def test_a_short_transfer_goes_on_where_it_ended():
    views = [memoryview(b"abcd"), memoryview(b"efgh")]
    assert [bytes(view) for view in _rest(views, 3)] == [b"d", b"efgh"]
    assert [bytes(view) for view in _rest(views, 4)] == [b"efgh"]
    assert [bytes(view) for view in _rest(views, 6)] == [b"gh"]
    with pytest.raises(HiCacheError, match="ended early"):
        _rest(views, 0)


def test_rates_are_bytes_by_the_time_from_first_to_last():
    mine, other = Series(), Series()
    mine.spans["set"] = [Span(1.0, 2.0, [0.9]), Span(5.0, 6.0, [0.5])]
    other.spans["set"] = [Span(0.5, 1.5, [0.9]), Span(5.5, 9.0, [0.7])]
    mine.merge(other)
    assert mine.rates("set", 300) == [400.0, 150.0]
    assert mine.seconds("set") == [0.5, 0.7, 0.9, 0.9]


def test_ratios_are_taken_round_by_round():
    raw, file = Series(), Series()
    raw.spans["set"] = [Span(0.0, 1.0, [1.0]), Span(0.0, 4.0, [4.0])]
    file.spans["set"] = [Span(0.0, 2.0, [2.0]), Span(0.0, 4.0, [4.0])]
    cell = Cell(a_plan(), {"raw": raw, "file": file}, "raw")
    assert cell.ratio("file", "set") == Spread(0.75, 0.5, 1.0)


def test_options_go_to_all_or_to_one():
    given = {"root": "/a", "nixl.root": "/b", "file.lanes": "1"}
    assert options_of("file", given, ["file", "nixl"]) == {"root": "/a", "lanes": "1"}
    assert options_of("nixl", given, ["file", "nixl"]) == {"root": "/b"}
    with pytest.raises(HiCacheError, match="Name one of: file"):
        options_of("file", given, ["file"])


def test_one_run_has_every_backend_beside_memcpy(run_json):
    report = run_json("bench", "memory", *SMALL)
    (cell,) = report["cells"]
    assert [c["name"] for c in cell["contestants"]] == ["memcpy", "memory"]
    assert (cell["reference"], cell["batches_per_thread"]) == ("memcpy", 8)
    for verb in ("set", "get"):
        assert cell["contestants"][0][verb]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        spread = cell["contestants"][1][verb]["gib_per_s"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert report["trouble"] == []


def test_a_local_backend_is_measured_beside_the_system_calls(run_json, site, acme_source, tmp_path):
    site.backend("acme", acme_source(capabilities='clear=True, deadline="cancel"', options="root: str"))
    report = run_json("bench", "acme", "memory", "--option", f"acme.root={tmp_path}/kv", *SMALL)
    (cell,) = report["cells"]
    assert [c["name"] for c in cell["contestants"]] == ["memcpy", "raw", "acme", "memory"]
    assert cell["reference"] == "raw"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize("shape", [("--threads", "2"), ("--processes", "2", "--threads", "2")])
def test_threads_and_processes_work_at_the_same_time(run_json, shape):
    report = run_json("bench", "memory", *SMALL, *shape)
    workers = report["threads"] * report["processes"]
    assert report["cells"][0]["batches_per_thread"] == 8 // workers
    assert report["trouble"] == []


def test_wrong_bytes_and_bad_answers_make_the_run_fail(run_json, site, acme_source):
    site.backend("acme", acme_source(damage="value[500] ^= 1"))
    report = run_json("bench", "acme", *SMALL, exit_code=1)
    assert report["trouble"] == ["acme at 1 KiB: 40 pages have other bytes than were set"]


def test_a_store_that_is_full_is_said(run_json, site, acme_source):
    site.backend("acme", acme_source(set="return [Status.NO_SPACE] * len(keys)"))
    trouble = run_json("bench", "acme", *SMALL, exit_code=1)["trouble"]
    assert "acme at 1 KiB: set NO_SPACE, 96 pages" in trouble


def test_a_process_that_fails_names_the_reason_not_the_broken_barrier(run, site, acme_source, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    away = 'import hicache_core; raise hicache_core.BackendUnavailable("no server", remedy="Start it.")'
    site.backend("acme", acme_source(open=away))
    result = run("bench", "acme", *SMALL, "--processes", "2")
    assert result.exit_code == 1
    assert "of the benchmark failed: no server. Start it." in result.stderr


def test_a_process_that_fails_alone_keeps_nobody_waiting(run, site, acme_source, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    second_fails = f"import os; os.close(os.open({str(tmp_path / 'first')!r}, os.O_CREAT | os.O_EXCL))"
    away = "import hicache_core; raise hicache_core.BackendUnavailable('one client at most')"
    body = f"""try:
            {second_fails}
        except FileExistsError:
            {away}"""
    site.backend("acme", acme_source(open=body))
    result = run("bench", "acme", *SMALL, "--processes", "2")
    assert result.exit_code == 1
    assert "of the benchmark failed: one client at most" in result.stderr


def test_html_has_a_plot_a_verb_and_a_size(run, tmp_path):
    path = tmp_path / "bench.html"
    result = run("bench", "memory", "--page-bytes", "1kib,2kib", *SMALL[2:], "--html", str(path))
    assert result.exit_code == 0
    assert path.read_text().count("<svg") == 2 + 2
    assert "2 KiB" in path.read_text()
    assert "Ratios are to &#x27;memcpy&#x27; in the same round." in path.read_text()


@pytest.mark.parametrize(
    "arguments", [(), ("memory", "memory"), ("memory", "--page-bytes", "1kib,x"), ("memory", "--batch", "0")]
)
def test_misuse_is_a_usage_error(run, arguments):
    assert run("bench", *arguments).exit_code == 2

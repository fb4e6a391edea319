from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from hicache_cli.trace import BLOCK_TOKENS, Request, read_trace
from hicache_cli.workers import Job, WorkerFailed, _drawn, play


def infinite_cache_hits(requests):
    """Count the blocks in the leading run that an earlier request has brought: (hits, blocks, hit tokens)."""
    seen = set()
    hits = blocks = tokens = 0
    for request in requests:
        run = 0
        while run < len(request.blocks) and request.blocks[run] in seen:
            run += 1
        seen.update(request.blocks)
        hits += run
        blocks += len(request.blocks)
        tokens += min(run * BLOCK_TOKENS, request.tokens)
    return hits, blocks, tokens


@pytest.fixture(scope="session")
def conversation_trace(repository) -> Path:
    """The published hour of conversations; test data kept beside the project."""
    named = os.environ.get("HICACHE_TRACE")
    path = Path(named) if named else repository.parent / "shared" / "traces" / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("no conversation_trace.jsonl; name one in HICACHE_TRACE")
    return path


@pytest.fixture
def log(tmp_path):
    """Write a log of requests, given as (tokens, block ids)."""

    def write(*requests, extra=""):
        lines = [json.dumps({"input_length": tokens, "hash_ids": blocks}) for tokens, blocks in requests]
        path = tmp_path / "log.jsonl"
        path.write_text("\n".join([*lines, extra]))
        return str(path)

    return write


@pytest.fixture
def server():
    """A store that several processes share: the options that reach it."""
    pytest.importorskip("hicache_conformance")
    from hicache_conformance.memory.harness import MemoryHarness

    harness = MemoryHarness()
    harness.start()
    yield f"server={harness.options()['server']}"
    harness.stop()


def test_hits_are_the_leading_run_and_the_last_block_may_be_partial(run_json, log):
    path = log((1100, [1, 2, 3]), (1100, [1, 2, 3]), (1600, [1, 9, 3, 4]), (512, [8]))
    report = run_json("replay", "--backend", "memory", "--trace", path)
    assert (report["hit_blocks"], report["blocks"]) == (4, 11)
    assert (report["hit_tokens"], report["tokens"]) == (1100 + 512, 4312)
    assert (report["verified_pages"], report["wrong_pages"]) == (4, 0)
    assert report["verbs"]["get"]["statuses"] == {"OK": 4}
    assert report["verbs"]["set"]["statuses"] == {"OK": 7}
    assert report["verbs"]["contains"]["statuses"] == {"MISS": 3, "OK": 4}
    assert report["verbs"]["get"]["nbytes"] == 4 * 16384
    assert report["break_even_tokens_per_s"] > 0
    assert report["trouble"] == []


def test_a_chain_of_more_than_a_batch_is_found_whole(run_json, log):
    chain = list(range(300))
    path = log((300 * 512, chain), (300 * 512, chain), (301 * 512, [*chain, 999]))
    report = run_json("replay", "--backend", "memory", "--trace", path, "--page-bytes", "64")
    assert report["hit_blocks"] == 600
    assert report["verbs"]["contains"]["batches"] == 1 + 3 + 3
    assert report["verbs"]["get"]["batches"] == 6
    assert report["verbs"]["set"]["batches"] == 3 + 1


def test_unreadable_lines_are_named_by_number_and_counted(run, log):
    path = log((512, [1]), (512, [1]), extra='{"input_length": 5}\nnonsense\n')
    result = run("replay", "--backend", "memory", "--trace", path)
    assert result.exit_code == 0
    assert result.stderr == (
        "line 3 is not a request: hash_ids is not a list of ids; skipped\n"
        "line 4 is not a request: not JSON: Expecting value at column 1; skipped\n"
        "2 unreadable lines were skipped\n"
    )
    assert "1 hits of 2 blocks (50.0%)" in result.stdout


def test_a_log_without_a_request_is_an_error(run, log):
    result = run("replay", "--backend", "memory", "--trace", log(extra="nonsense"))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: no request in ")


def test_limit_and_seed_choose_the_load(run_json):
    one = run_json("replay", "--backend", "memory", "--limit", "50", "--page-bytes", "64")
    same = run_json("replay", "--backend", "memory", "--limit", "50", "--page-bytes", "64")
    other = run_json("replay", "--backend", "memory", "--limit", "50", "--page-bytes", "64", "--seed", "1")
    assert one["requests"] == 50
    assert one["hit_blocks"] == same["hit_blocks"] > 0
    assert other["blocks"] != one["blocks"]


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ("4 gigs", "'4 gigs' is not a size"),
        ("0", "'0' is not a size of at least 1 byte"),
        ("-5", "'-5' is not a size"),
    ],
)
def test_a_page_size_of_nonsense_is_a_usage_error(run, size, complaint):
    result = run("replay", "--backend", "memory", "--page-bytes", size)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_page_that_cannot_hold_its_hash_is_refused(run):
    result = run("replay", "--backend", "memory", "--page-bytes", "16")
    assert result.exit_code == 1
    assert "Use at least 32 bytes a page." in result.stderr


def test_an_option_without_a_value_is_a_usage_error(run):
    assert "'root' is not an option (write NAME=VALUE" in run("replay", "--option", "root").stderr


def test_bad_options_are_all_named_at_once(run):
    result = run("replay", "--backend", "memory", "--option", "stor=x", "--option", "capacity=many")
    assert result.exit_code == 1
    assert "stor is unknown (store?)" in result.stderr
    assert "'many' is not a size" in result.stderr


def test_capacity_of_a_backend_that_has_none_is_refused(run, site, acme_source):
    site.backend("acme", acme_source())
    result = run("replay", "--backend", "acme", "--capacity-pages", "10")
    assert result.exit_code == 1
    assert "capacity is unknown: 'acme' cannot be limited from here" in result.stderr


def test_capacity_pages_limit_the_store(run_json, log):
    path = log(*[(512, [n]) for n in range(100)], *[(512, [n]) for n in range(100)])
    arguments = ("replay", "--backend", "memory", "--trace", path, "--page-bytes", "1kib")
    assert run_json(*arguments)["hit_blocks"] == 100
    report = run_json(*arguments, "--capacity-pages", "50")
    assert report["hit_blocks"] == 0
    assert report["capacity_nbytes"] == 50 * 1024
    assert report["store_nbytes"] <= 50 * 1024


def test_wrong_bytes_are_counted_named_and_make_the_run_fail(run_json, run, site, acme_source, log):
    site.backend("acme", acme_source(damage="value[20] ^= 1"))
    path = log((1024, [1, 2]), (1024, [1, 2]))
    report = run_json("replay", "--backend", "acme", "--trace", path, exit_code=1)
    assert (report["hit_blocks"], report["verified_pages"], report["wrong_pages"]) == (0, 0, 2)
    assert report["trouble"][0] == "2 pages came back with other bytes than were set"
    assert report["trouble"][1].startswith("request 2: page ")
    assert "TROUBLE: 2 pages came back" in run("replay", "--backend", "acme", "--trace", path).stderr


def test_a_get_that_writes_nothing_is_found_out(run_json, site, acme_source, log):
    site.backend("acme", acme_source().replace("locs.views(i)[0][:] = value", "pass"))
    report = run_json("replay", "--backend", "acme", "--trace", log((512, [1]), (512, [1])), exit_code=1)
    assert report["wrong_pages"] == 1


def test_a_store_that_answers_with_errors_makes_the_run_fail(run_json, site, acme_source, log):
    site.backend("acme", acme_source(set="return [Status.DENIED] * len(keys)"))
    report = run_json("replay", "--backend", "acme", "--trace", log((1024, [1, 2])), exit_code=1)
    assert report["trouble"] == ["set: 2 pages DENIED"]


def test_a_store_that_cannot_be_reached_is_an_error(run, site, acme_source):
    away = 'import hicache_core; raise hicache_core.BackendUnavailable("no server", remedy="Start it.")'
    site.backend("acme", acme_source(open=away))
    result = run("replay", "--backend", "acme")
    assert (result.exit_code, result.stderr) == (1, "Error: no server. Start it.\n")


def test_pages_are_removed_unless_kept_and_kept_ones_are_found_again(run_json, server, log):
    arguments = ("replay", "--backend", "memory", "--option", server, "--trace", log((1024, [1, 2])))
    assert [run_json(*arguments)["hit_blocks"] for _ in range(2)] == [0, 0]
    assert [run_json(*arguments, "--keep", "a")["hit_blocks"] for _ in range(2)] == [0, 2]
    assert run_json(*arguments, "--keep", "b")["hit_blocks"] == 0
    assert run_json(*arguments)["store_nbytes"] == 3 * 2 * 16384


def test_workers_share_the_store_and_their_counts_are_merged(run_json, server, log):
    requests = [(1024, [2 * n, 2 * n + 1]) for n in range(30)]
    arguments = ("replay", "--backend", "memory", "--option", server, "--page-bytes", "1kib", "--keep", "w")
    first = run_json(*arguments, "--trace", log(*requests), "--workers", "3")
    again = run_json(*arguments, "--trace", log(*requests), "--workers", "2")
    assert (first["requests"], first["blocks"], first["hit_blocks"]) == (30, 60, 0)
    assert (again["requests"], again["blocks"], again["hit_blocks"]) == (30, 60, 60)
    assert again["verified_pages"] == 60
    assert again["verbs"]["get"]["batches"] == 30


def test_workers_draw_the_log_in_order_and_each_request_once():
    requests = [Request(512, (n,)) for n in range(7)]
    counter = multiprocessing.get_context("spawn").Value("q", 0)
    quick, slow = _drawn(requests, counter), _drawn(requests, counter)
    assert next(slow) == (0, requests[0])
    assert [next(quick)[0] for _ in range(4)] == [1, 2, 3, 4]
    assert (next(slow)[0], next(quick)[0]) == (5, 6)
    assert [*quick, *slow] == []


def test_a_worker_s_failure_is_the_run_s(server):
    job = Job("memory", {"stor": "x"}, "t", 1024, 5.0)
    with pytest.raises(WorkerFailed) as caught:
        play(job, [Request(512, (1,))] * 2, 2, lambda count: None)
    assert "stor is unknown (store?)" in str(caught.value)


def test_a_temporary_folder_is_used_said_and_removed_where_no_root_is_set(run, site, acme_source, tmp_path):
    witness = tmp_path / "witness"
    site.backend(
        "acme",
        acme_source(
            options="root: str",
            open=f"import pathlib; pathlib.Path({str(witness)!r}).write_text(self.options.root)",
        ),
    )
    result = run("replay", "--backend", "acme", "--limit", "5")
    folder = witness.read_text()
    assert (
        f"No root is set for 'acme': used the temporary folder {folder}, which is removed." in result.output
    )
    assert not Path(folder).exists()


def test_a_root_from_the_environment_is_used(run, site, acme_source, tmp_path, monkeypatch):
    monkeypatch.setenv("HICACHE_ACME_ROOT", str(tmp_path))
    site.backend("acme", acme_source(options="root: str"))
    assert "temporary folder" not in run("replay", "--backend", "acme", "--limit", "5").output


def test_html_is_one_page_with_both_plots(run, tmp_path):
    path = tmp_path / "report.html"
    assert run("replay", "--backend", "memory", "--limit", "100", "--html", str(path)).exit_code == 0
    text = path.read_text()
    assert text.count("<svg") == 2
    assert "Hit rate over time" in text
    assert "Latency of a batch" in text
    assert "http" not in text
    assert "<script" not in text


@pytest.mark.parametrize("place", ["no/such/folder/report.html", "."])
def test_html_that_cannot_be_written_is_refused_before_the_replay(run, tmp_path, place):
    result = run("replay", "--backend", "memory", "--limit", "1", "--html", str(tmp_path / place))
    assert result.exit_code == 2
    assert "cannot be written; name a file in a folder of yours" in result.stderr
    assert result.stdout == ""


def test_a_worker_that_dies_is_named_and_ends_the_run(run, site, acme_source, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    site.backend("acme", acme_source(set="import os; os.kill(os.getpid(), 9)"))
    result = run("replay", "--backend", "acme", "--limit", "20", "--workers", "2")
    assert result.exit_code == 1
    assert "Error: worker 0 ended without a result." in result.stderr or "Error: worker 1" in result.stderr


def test_the_program_reports_hits_and_exits_0(program):
    done = program("replay", "--backend", "memory", "--limit", "20")
    assert done.returncode == 0, done.stderr
    assert "hits of" in done.stdout
    assert done.stderr == ""


def test_the_conversation_trace_has_its_published_number_of_hits(conversation_trace):
    with open(conversation_trace) as lines:
        trace = read_trace(lines)
    assert trace.unreadable == []
    assert infinite_cache_hits(trace.requests)[:2] == (105_710, 288_500)


def test_a_replay_of_the_trace_reports_the_trace_s_own_hits(conversation_trace, run_json):
    with open(conversation_trace) as lines:
        expected = infinite_cache_hits(read_trace(lines).requests)
    arguments = ("--trace", str(conversation_trace), "--backend", "memory", "--page-bytes", "64")
    report = run_json("replay", *arguments)
    assert (report["hit_blocks"], report["blocks"], report["hit_tokens"]) == expected
    assert (report["verified_pages"], report["wrong_pages"]) == (expected[0], 0)


@pytest.mark.slow
def test_a_replay_of_the_trace_on_the_file_backend_verifies_every_byte(
    conversation_trace, run_json, tmp_path
):
    with open(conversation_trace) as lines:
        expected = infinite_cache_hits(read_trace(lines).requests)
    report = run_json("replay", "--trace", str(conversation_trace), "--option", f"root={tmp_path}")
    assert (report["hit_blocks"], report["blocks"], report["hit_tokens"]) == expected
    assert (report["verified_pages"], report["wrong_pages"]) == (expected[0], 0)

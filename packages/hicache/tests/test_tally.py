from __future__ import annotations

from hicache_cli.html import distribution, hit_rate_lines
from hicache_cli.report import ReplayReport
from hicache_cli.tally import Tally


def tally(places, hits, *, started_s=0.0, ended_s=1.0) -> Tally:
    made = Tally(requests=len(places), started_s=started_s, ended_s=ended_s)
    for place, hit in zip(places, hits, strict=True):
        made.blocks += 4
        made.hit_blocks += hit
        made.places.append(place)
        made.request_blocks.append(4)
        made.request_hits.append(hit)
    return made


def test_merging_adds_counts_and_spans_the_time():
    total = Tally()
    one, other = (
        tally([0, 2], [0, 4], started_s=5.0, ended_s=7.0),
        tally([1, 3], [1, 2], started_s=4.0, ended_s=6.5),
    )
    one.verbs["get"].seconds.append(0.5)
    other.verbs["get"].seconds.append(0.25)
    one.verbs["get"].statuses["OK"] += 2
    other.verbs["get"].statuses.update(["OK", "MISS"])
    one.store_nbytes = 7
    total.merge(one)
    total.merge(other)
    assert (total.requests, total.blocks, total.hit_blocks) == (4, 16, 7)
    assert (total.started_s, total.ended_s, total.elapsed_s) == (4.0, 7.0, 3.0)
    assert list(total.verbs["get"].seconds) == [0.5, 0.25]
    assert total.verbs["get"].statuses == {"OK": 3, "MISS": 1}
    assert list(total.places) == [0, 2, 1, 3]
    assert total.store_nbytes == 7


def test_quantiles_are_of_the_samples():
    verb = Tally().verbs["get"]
    assert verb.quantile_s(0.5) == 0.0
    verb.seconds.extend([0.4, 0.1, 0.3, 0.2])
    assert [verb.quantile_s(q) for q in (0.0, 0.5, 0.99)] == [0.1, 0.3, 0.4]


def test_the_hit_rate_over_time_is_in_the_log_s_order_whoever_played_it():
    total = Tally()
    total.merge(tally([0, 2], [0, 4]))
    total.merge(tally([1, 3], [1, 2]))
    stretch, since_start = hit_rate_lines(total)
    assert stretch.points == [(1.0, 0.0), (2.0, 0.25), (3.0, 1.0), (4.0, 0.5)]
    assert since_start.points == [(1.0, 0.0), (2.0, 1 / 8), (3.0, 5 / 12), (4.0, 7 / 16)]


def test_a_long_log_is_drawn_with_few_points_that_end_at_its_end():
    stretch, since_start = hit_rate_lines(tally(list(range(10_001)), [1] * 10_001))
    assert len(stretch.points) <= 120
    assert since_start.points[-1] == (10_001.0, 0.25)


def test_a_distribution_reaches_1_at_the_slowest_sample():
    assert distribution([]) == []
    assert distribution([0.003, 0.001]) == [(1.0, 0.5), (3.0, 1.0)]


def test_break_even_is_hit_tokens_by_the_seconds_of_exists_and_get():
    made = tally([0], [2])
    made.hit_tokens = 1000
    made.verbs["contains"].seconds.append(0.1)
    made.verbs["get"].seconds.append(0.4)
    made.verbs["set"].seconds.append(9.0)
    report = ReplayReport("b", "1", "log", 64, 1, None, made, [], [])
    assert report.break_even_tokens_s == 2000.0
    assert ReplayReport("b", "1", "log", 64, 1, None, Tally(), [], []).break_even_tokens_s is None

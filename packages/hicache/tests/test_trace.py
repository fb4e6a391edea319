from __future__ import annotations

import json

import pytest

from hicache_cli.trace import Request, read_trace


def line(**fields):
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]} | fields)


def test_reads_requests_in_order():
    trace = read_trace([line(), line(input_length=3, hash_ids=["a"])])
    assert trace.requests == [Request(600, (7, 8)), Request(3, ("a",))]
    assert trace.unreadable == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("{", "not JSON: Expecting property name", id="not-json"),
        pytest.param("[1]", "a list, not an object", id="list"),
        pytest.param(
            line(input_length="many"), "input_length is 'many', not a number of tokens", id="text-length"
        ),
        pytest.param(line(input_length=-1), "input_length is -1, not a number of tokens", id="negative"),
        pytest.param(line(input_length=True), "input_length is True, not a number of tokens", id="bool"),
        pytest.param(line(hash_ids=None), "hash_ids is not a list of ids", id="no-ids"),
        pytest.param(line(hash_ids=[1, 2.5]), "hash_ids is not a list of ids", id="float-id"),
        pytest.param("[" * 100_000, "", id="deeply-nested"),
    ],
)
def test_an_unreadable_line_is_named_by_number_and_the_rest_goes_on(text, reason):
    trace = read_trace([line(), "", text, line(input_length=9)])
    assert [request.tokens for request in trace.requests] == [600, 9]
    ((number, why),) = trace.unreadable
    assert number == 3
    assert why.startswith(reason)


def test_limit_counts_requests_not_lines():
    assert len(read_trace([line(), "junk", line(), line()], limit=2).requests) == 2


def test_the_last_block_of_a_request_may_be_partial():
    request = Request(600, (1, 2))
    assert [request.tokens_of(n) for n in range(3)] == [0, 512, 600]

"""A log of requests: Mooncake's JSONL traces, read line by line, bad lines named and skipped.

A line is one request: ``input_length`` in tokens and ``hash_ids``, one id for
each block of 512 tokens, the last of which may be partial. Ids are chained: an
equal id means an equal prefix up to and including that block.
Source: kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

#: Tokens a block in Mooncake's published traces.
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request: how many tokens its prompt has, and its chain of block ids."""

    tokens: int
    blocks: tuple[int | str, ...]

    def tokens_of(self, blocks: int) -> int:
        """Count the tokens in the first ``blocks`` blocks; the last one of the request may be partial."""
        return min(blocks * BLOCK_TOKENS, self.tokens)


@dataclass(slots=True)
class Trace:
    """The requests of a log in order, and the lines that could not be read."""

    requests: list[Request] = field(default_factory=list)
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    """(line number from 1, why)."""


def read_trace(lines: Iterable[str], limit: int | None = None) -> Trace:
    """Read up to ``limit`` requests; an unreadable line is recorded, a blank one ignored."""
    trace = Trace()
    for number, line in enumerate(lines, 1):
        if limit is not None and len(trace.requests) >= limit:
            break
        if not line.strip():
            continue
        try:
            trace.requests.append(_request(json.loads(line)))
        except (ValueError, RecursionError) as error:
            trace.unreadable.append((number, _reason(error)))
    return trace


def _request(record: Any) -> Request:
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    tokens, blocks = record.get("input_length"), record.get("hash_ids")
    if type(tokens) is not int or tokens < 0:
        raise ValueError(f"input_length is {tokens!r}, not a number of tokens")
    if not isinstance(blocks, list) or not all(type(block) in (int, str) for block in blocks):
        raise ValueError("hash_ids is not a list of ids")
    return Request(tokens, tuple(blocks))


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return str(error) or type(error).__name__

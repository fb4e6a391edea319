"""A seeded load of multi-turn conversations, for when there is no log of real requests.

Conversations begin with one of a few system prompts, and each turn's prompt is
the whole conversation so far, so that turn t+1 shares with turn t all blocks but
the last, partial one. Turns of several conversations interleave. The same seed
gives the same requests on every machine and Python.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from hicache_cli.trace import BLOCK_TOKENS, Request

#: Requests of the load unless --limit says otherwise.
DEFAULT_REQUESTS = 2_000

#: Conversations under way at any time.
_ACTIVE = 64
_SYSTEM_PROMPTS = 8
_SYSTEM_TOKENS = (1_000, 6_000)
_USER_TOKENS = (50, 3_000)
_ANSWER_TOKENS = (50, 1_000)
#: Chance that a conversation ends after a turn: five turns on average.
_END_CHANCE = 0.2


@dataclass(slots=True)
class _Conversation:
    tokens: int
    full_blocks: list[int] = field(default_factory=list)


def conversations(seed: int = 0) -> Iterator[Request]:
    """Yield requests without end."""
    draw = random.Random(seed)
    ids = count()
    system_tokens = [draw.randint(*_SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]
    system_blocks = [[next(ids) for _ in range(tokens // BLOCK_TOKENS)] for tokens in system_tokens]
    active: list[_Conversation] = []
    while True:
        if len(active) < _ACTIVE:
            prompt = draw.randrange(_SYSTEM_PROMPTS)
            active.append(_Conversation(system_tokens[prompt], list(system_blocks[prompt])))
        place = draw.randrange(len(active))
        talk = active[place]
        talk.tokens += draw.randint(*_USER_TOKENS)
        yield _prompt(talk, ids)
        talk.tokens += draw.randint(*_ANSWER_TOKENS)
        if draw.random() < _END_CHANCE:
            active.pop(place)


def _prompt(talk: _Conversation, ids: Iterator[int]) -> Request:
    whole, partial = divmod(talk.tokens, BLOCK_TOKENS)
    talk.full_blocks += [next(ids) for _ in range(whole - len(talk.full_blocks))]
    tail = (next(ids),) if partial else ()
    return Request(talk.tokens, (*talk.full_blocks, *tail))

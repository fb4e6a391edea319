"""Case and outcome: how a test says what it proves and what it needs, and what can become of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn

import pytest

#: In the order in which they run: what everything rests on comes first, what breaks the store last.
LEVELS = (
    "core",
    "batch",
    "memory",
    "lifecycle",
    "identity",
    "shared",
    "durable",
    "evict",
    "threads",
    "fault",
)

Outcome = Literal["pass", "fail", "unsupported", "not-run"]
OUTCOMES: tuple[Outcome, ...] = ("pass", "fail", "unsupported", "not-run")

#: Seconds that a case may take before it counts as hanging, unless it says otherwise.
BUDGET_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One test as reports know it."""

    id: str
    level: str
    clauses: tuple[str, ...]
    needs: tuple[str, ...]
    """Capabilities without which it is unsupported."""
    faults: tuple[str, ...]
    """Powers of the harness without which it is unsupported."""
    budget_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Case:
        listed = {name: tuple(fields[name]) for name in ("clauses", "needs", "faults")}
        return cls(fields["id"], fields["level"], budget_s=fields["budget_s"], **listed)


def case_of(item: pytest.Item) -> Case:
    """Read a test's marks; its level is the module that defines it."""
    function = getattr(item, "function", None)
    level = str(getattr(function, "__module__", "")).rpartition(".")[2]
    budget = item.get_closest_marker("budget")
    return Case(
        id=item.name,
        level=level,
        clauses=_arguments(item, "clause"),
        needs=_arguments(item, "needs"),
        faults=_arguments(item, "faults"),
        budget_s=float(budget.args[0]) if budget else BUDGET_S,
    )


def unsupported(reason: str) -> NoReturn:
    """End a test whose capability or power is not declared."""
    pytest.skip(f"unsupported: {reason}")


def not_run(reason: str) -> NoReturn:
    """End a test whose prerequisite is missing; its level is then not reached."""
    pytest.skip(f"not-run: {reason}")


def outcome_of_skip(text: str) -> tuple[Outcome, str]:
    """Tell the two kinds of skip apart; any other skip is one that was not run."""
    kind, _, reason = text.removeprefix("Skipped: ").partition(": ")
    if kind == "unsupported":
        return "unsupported", reason
    return "not-run", reason if kind == "not-run" else text


def _arguments(item: pytest.Item, name: str) -> tuple[str, ...]:
    found = [str(argument) for mark in item.iter_markers(name) for argument in mark.args]
    return tuple(dict.fromkeys(found))

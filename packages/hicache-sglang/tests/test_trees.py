"""The real UnifiedRadixCache and HybridCacheController of SGLang 0.5.23: the same bytes come back."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(300)  # a whole SGLang is imported, on a machine that may be busy

#: What SGLang itself cannot do: pools whose K and V differ have no flat pages for the generic calls.
REFUSED = "it has no flat pages, and interface_v1 is not set"
ZERO_COPY = "page_get_zero_copy"
FUNCTIONS = {"generic": "generic_page_get", "zero-copy": ZERO_COPY, "plugin": ZERO_COPY}
SLICE = (
    "mha page_first",
    "mha page_head",
    "asymmetric page_first_direct",
    "mla layer_first",
    "dsa page_first",
    "mla_mamba page_first_direct",
    "two ranks",
    "others",
)


def verdict(name: str, outcome: str) -> bool:
    if name.startswith("others"):
        return outcome == "ok (generic_page_get)"
    if name.startswith("asymmetric") and name.endswith("generic"):
        return outcome.startswith("PoolRefused") and REFUSED in outcome
    way = name.rpartition(" ")[2]
    return outcome == ("ok" if name.startswith("two ranks") else f"ok ({FUNCTIONS[way]})")


def test_pools_of_each_family_come_back_byte_for_byte(engine):
    found = json.loads(engine("tree_cases.py", *SLICE))
    assert len(found) == 3 * (len(SLICE) - 1) + 2
    assert {name: outcome for name, outcome in found.items() if not verdict(name, outcome)} == {}


@pytest.mark.slow
def test_every_pool_and_layout_comes_back_byte_for_byte(engine):
    found = json.loads(engine("tree_cases.py"))
    assert len(found) == 3 * 17 + 2
    assert {name: outcome for name, outcome in found.items() if not verdict(name, outcome)} == {}

"""`hicache replay --l2-pages N`: the same bytes, the hits told by tier."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("hicache_cli", reason="needs the distribution hicache")
from click.testing import CliRunner

from hicache_cli.replay import replay


def played(*arguments):
    result = CliRunner().invoke(replay, ["--limit", "60", "--page-bytes", "4kib", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_an_engine_with_much_memory_asks_the_store_for_nothing_twice():
    report = played("--l2-pages", "4000")
    bare = played()
    assert report["hit_blocks"] == bare["hit_blocks"]
    assert report["hit_blocks_by_tier"] == {"memory": bare["hit_blocks"], "store": 0}
    assert (report["wrong_pages"], report["verified_pages"]) == (0, bare["hit_blocks"])
    assert (report["break_even_tokens_per_s"], bare["hit_blocks_by_tier"]) == (None, {})


def test_an_engine_with_little_memory_gets_the_rest_from_the_store():
    report = played("--l2-pages", "40")
    tiers = report["hit_blocks_by_tier"]
    assert tiers["memory"] + tiers["store"] == report["hit_blocks"]
    assert tiers["store"] > 0
    assert (report["wrong_pages"], report["trouble"]) == (0, [])
    assert report["break_even_tokens_per_s"] > 0


def test_several_workers_have_no_common_memory():
    result = CliRunner().invoke(replay, ["--limit", "5", "--l2-pages", "5", "--workers", "2"])
    assert result.exit_code == 1
    assert "--l2-pages and --workers 2" in str(result.exception)

"""Which part of the model a pool holds: any other part must have another key, any other asker the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from hicache_sglang.components import Ranks, component_of, is_replicated
from hicache_sglang.geometry import Geometry

MLA_POOL = SimpleNamespace(layout="page_first", dtype="torch.bfloat16", storage_format_tag=None)
MHA_POOL = SimpleNamespace(layout="page_first", dtype="torch.bfloat16", storage_format_tag=None, head_num=4)
GEOMETRY = Geometry("direct", 16, 8, 4096)


def key(name="kv", pool=MHA_POOL, geometry=GEOMETRY, *, draft_model=None, group=0, **ranks):
    return component_of(name, pool, geometry, Ranks(**ranks), draft_model=draft_model, group=group).key


def test_ranks_are_read_from_whatever_fields_a_release_has():
    old = SimpleNamespace(tp_rank=1, tp_size=2, is_mla_model=True)
    new = SimpleNamespace(
        tp_rank=1, tp_size=2, pp_rank=0, pp_size=2, attn_cp_rank=1, attn_cp_size=4, dp_rank=3,
        tp_lcm_size=None, should_split_heads=False, is_mla_model=False, dcp_size=1, dcp_rank=0,
    )  # fmt: skip
    assert Ranks.of(old) == Ranks(tp_rank=1, tp_size=2, is_mla=True)
    assert Ranks.of(new) == Ranks(tp_rank=1, tp_size=2, pp_size=2, cp_rank=1, cp_size=4, dp_rank=3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dict(tp_rank=0, tp_size=2), dict(tp_rank=1, tp_size=2)),
        (dict(tp_rank=0, tp_size=2), dict(tp_rank=0, tp_size=4)),
        (dict(pp_rank=0, pp_size=2), dict(pp_rank=1, pp_size=2)),
        (dict(cp_rank=0, cp_size=2), dict(cp_rank=1, cp_size=2)),
        (dict(dcp_rank=0, dcp_size=2), dict(dcp_rank=1, dcp_size=2)),
        (dict(pool=MHA_POOL), dict(pool=SimpleNamespace(**vars(MHA_POOL) | {"layout": "page_head"}))),
        (dict(pool=MHA_POOL), dict(pool=SimpleNamespace(**vars(MHA_POOL) | {"dtype": "torch.float8_e5m2"}))),
        (dict(pool=MHA_POOL), dict(pool=SimpleNamespace(**vars(MHA_POOL) | {"storage_format_tag": "nvfp4"}))),
        (dict(geometry=GEOMETRY), dict(geometry=Geometry("flat", 16, 8, 4096))),
        (dict(geometry=GEOMETRY), dict(geometry=Geometry("direct", 16, 8, 8192))),
        (dict(name="draft", draft_model="a"), dict(name="draft", draft_model="b")),
    ],
    ids=[
        "tp rank",
        "tp size",
        "pp",
        "cp",
        "dcp",
        "byte order",
        "dtype",
        "format tag",
        "flat",
        "size",
        "draft model",
    ],
)
def test_another_part_has_another_key(one, other):
    assert key(**one) != key(**other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dict(dp_rank=0), dict(dp_rank=3)),
        (
            dict(pool=MLA_POOL, is_mla=True, tp_rank=0, tp_size=8),
            dict(pool=MLA_POOL, is_mla=True, tp_rank=5, tp_size=8),
        ),
        (dict(pool=MLA_POOL, is_mla=True, tp_size=8), dict(pool=MLA_POOL, is_mla=True, tp_size=2)),
        (
            dict(pool=SimpleNamespace(**vars(MHA_POOL) | {"layout": "layer_first"})),
            dict(pool=SimpleNamespace(**vars(MHA_POOL) | {"layout": "page_first_direct"})),
        ),
        (dict(geometry=GEOMETRY), dict(geometry=Geometry("direct", 16, 99, 4096))),
        (dict(draft_model="a"), dict(draft_model="b")),
    ],
    ids=["dp rank", "MLA rank", "MLA size", "equal byte order", "pool size", "no draft layers"],
)
def test_another_asker_of_the_same_part_has_the_same_key(one, other):
    assert key(**one) == key(**other)


@pytest.mark.parametrize(
    ("name", "pool", "replicated"),
    [
        ("kv", MLA_POOL, True),
        ("indexer", MLA_POOL, True),
        ("deepseek_v4_c4_state", MLA_POOL, True),
        ("mamba", MLA_POOL, False),
        ("draft", MHA_POOL, False),
        ("something_new", MLA_POOL, False),
    ],
)
def test_beside_a_replicated_mla_only_what_sglang_writes_once_is_replicated(name, pool, replicated):
    assert is_replicated(name, pool, Ranks(tp_rank=1, tp_size=2, is_mla=True)) is replicated
    assert not is_replicated(name, pool, Ranks(tp_rank=1, tp_size=2))


def test_head_groups_meet_between_tensor_parallel_sizes():
    """Rank 1 of 2 with four head groups in all has the pages of ranks 2 and 3 of 4."""
    pool = SimpleNamespace(**vars(MHA_POOL) | {"layout": "page_head"})
    split = [
        key(pool=pool, tp_rank=1, tp_size=2, tp_lcm_size=4, split_heads=True, group=group) for group in (0, 1)
    ]
    whole = [key(pool=pool, tp_rank=rank, tp_size=4, tp_lcm_size=4) for rank in (2, 3)]
    assert split == whole


def test_a_pool_with_packed_draft_layers_belongs_to_the_draft_model_too():
    packed = SimpleNamespace(**vars(MHA_POOL), layer_num=5, target_layer_num=4)
    assert key(pool=packed, draft_model="a") != key(pool=packed, draft_model="b")

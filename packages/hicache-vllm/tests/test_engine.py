"""A real vLLM 0.32 on a CPU: the prefix comes from the store, the answers stay the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # a whole engine is started, on a machine that may be busy

BLOCK = 32
#: Two prompts of about 3,000 tokens, a byte each, that share no block.
PROMPTS = [
    "".join(f"[{i}] the {word} of item {i * i % 97} is {i * 7919 % 1000}. " for i in range(88)) + "Q?"
    for word in ("value", "price")
]
SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def model(program, tmp_path_factory):
    from vllm_model import make_model

    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ask(program, model):
    """Runs a fresh engine through some steps; nothing of it may be left in shared memory."""

    def run(steps, tier=None, *, timeout_s=240.0, model=model, **more):
        before = set(SHM.glob("vllm_offload_*"))
        wanted = {"model": model, "tier": tier, "steps": steps} | more
        told = json.loads(program("cpu/vllm_engine.py", json.dumps(wanted), timeout_s=timeout_s))
        assert set(SHM.glob("vllm_offload_*")) - before == set()
        return told

    return run


@pytest.fixture(scope="module")
def baseline(ask):
    """The answers without any tier."""
    return ids(ask([{"prompts": PROMPTS}])["steps"][0])


def ids(answers):
    return [answer["ids"] for answer in answers]


def full_blocks(answers):
    return sum(answer["prompt"] // BLOCK for answer in answers)


def tier_of(root, **more):
    return {"type": "hicache", "backend": "file", "options": {"root": str(root)}} | more


def stored_and_found(ask, baseline, tier, **more):
    """Store in one process, find in another; both answer as without a tier, the second from the store."""
    (first,) = ask([{"prompts": PROMPTS}], tier, **more)["steps"]
    told = ask([{"prompts": PROMPTS}], tier, **more)
    (second,) = told["steps"]
    assert ids(first) == ids(second) == baseline
    assert [answer["cached"] for answer in first] == [0, 0]
    assert all(answer["prompt"] >= 2900 for answer in second)
    blocks = full_blocks(second)
    chunks = blocks // more.get("blocks_per_chunk", 1)
    assert told["metrics"]["kv_offload_tiering_chunk_hits{tier=1:hicache}"] >= 0.98 * chunks
    assert sum(answer["cached"] for answer in second) >= 0.98 * blocks * BLOCK
    return told


def test_a_second_process_finds_the_prompts_of_the_first(ask, baseline, tmp_path):
    told = stored_and_found(ask, baseline, tier_of(tmp_path / "kv"))
    pages = "kv_offload_hicache_pages{tier=hicache,backend=file,verb=get,status=OK}"
    assert told["metrics"][pages] == told["metrics"]["kv_offload_tiering_chunk_hits{tier=1:hicache}"]


@pytest.mark.slow
def test_pages_of_several_blocks_and_prefix_caching_change_no_answer(ask, baseline, tmp_path):
    stored_and_found(ask, baseline, tier_of(tmp_path / "kv"), blocks_per_chunk=4)
    again = ask([{"prompts": PROMPTS * 2}], tier_of(tmp_path / "kv"), blocks_per_chunk=4, prefix_caching=True)
    assert ids(again["steps"][0]) == baseline * 2


def zeroed(content: bytes) -> bytes:
    third = len(content) // 3
    return content[:third] + bytes(third) + content[2 * third :]


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize("damage", [zeroed, pytest.param(halved, marks=pytest.mark.slow)])
def test_damaged_pages_are_refused_and_computed_anew(ask, baseline, tmp_path, damage):
    tier = tier_of(tmp_path / "kv")
    ask([{"prompts": PROMPTS}], tier)
    segments = list((tmp_path / "kv").rglob("*.seg"))
    for segment in segments:
        segment.write_bytes(damage(segment.read_bytes()))
    told = ask([{"prompts": PROMPTS}], tier)
    (second,) = told["steps"]
    assert segments
    assert ids(second) == baseline
    cached = sum(answer["cached"] for answer in second)
    assert cached < 0.98 * full_blocks(second) * BLOCK
    if damage is zeroed:
        corrupt = "kv_offload_hicache_pages{tier=hicache,backend=file,verb=get,status=CORRUPT}"
        assert told["metrics"][corrupt] > 0


@pytest.fixture(scope="module")
def filled(ask, tmp_path_factory):
    """A store that holds the first prompt; copy it."""
    root = tmp_path_factory.mktemp("filled") / "kv"
    ask([{"prompts": PROMPTS[:1]}], tier_of(root))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["contains", "get", "set"])
@pytest.mark.parametrize(
    ("fault", "bounce"),
    [("hang", True), ("hang", False), ("die", False), ("raise", False)],
    ids=["hang for ever, bounced", "hang for 6 s, held", "die", "raise"],
)
def test_a_store_that_fails_in_the_middle_changes_no_answer(
    ask, baseline, filled, tmp_path, verb, fault, bounce
):
    root, mode = tmp_path / "kv", tmp_path / "mode"
    if verb != "set":
        shutil.copytree(filled, root)
    mode.write_text(f"{verb} {fault}")
    options = {"backend_name": "dynamic", "module_path": "vllm_faulty", "class_name": "FaultyFile"}
    options |= {"root": str(root), "mode_file": str(mode), "hang_s": 3600.0 if bounce else 6.0}
    tier = {"type": "hicache", "backend": "dynamic", "options": options, "timeout_s": 1.0, "bounce": bounce}
    steps = [{"prompts": PROMPTS, "settle_s": 20}, {"write": {str(mode): ""}}, {"prompts": PROMPTS}]
    told = ask(steps, tier)
    during, _, after = told["steps"]
    assert ids(during) == ids(after) == baseline
    assert max(answer["seconds"] for answer in during) < 20
    if verb == "get" and not bounce and fault != "raise":
        # The half that came before the fault was used; bounced, a batch that is left behind gives nothing.
        assert BLOCK <= during[0]["cached"] <= (during[0]["prompt"] // BLOCK - 1) * BLOCK


@pytest.mark.slow
def test_two_adapters_of_one_name_and_path_share_no_page(ask, tmp_path):
    from vllm_model import make_adapter

    path, tier = tmp_path / "adapter", tier_of(tmp_path / "kv")
    adapted = [{"prompts": PROMPTS[:1], "adapter": ["tuned", 1, str(path)]}]
    told = {}
    for seed in (1, 2):
        make_adapter(path, seed=seed)
        (plain,) = ask(adapted, lora=True)["steps"]
        (stored,) = ask(adapted, tier, lora=True)["steps"]
        (found,) = ask(adapted, tier, lora=True)["steps"]
        assert ids(plain) == ids(stored) == ids(found)
        told[seed] = (ids(plain), stored[0]["cached"], found[0]["cached"] // BLOCK)
    blocks = plain[0]["prompt"] // BLOCK
    assert told[1][0] != told[2][0]
    assert [told[seed][1:] for seed in (1, 2)] == [(0, blocks), (0, blocks)]


@pytest.mark.slow
def test_other_weights_at_the_same_path_share_no_page(ask, model, tmp_path):
    from vllm_model import make_model

    tier, place, steps = tier_of(tmp_path / "kv"), tmp_path / "model", [{"prompts": PROMPTS[:1]}]
    told = []
    for seed in (0, 1):
        make_model(place, seed=seed)
        (answers,) = ask(steps, tier, model=str(place))["steps"]
        told.append((ids(answers), answers[0]["cached"]))
    assert told[0][1] == told[1][1] == 0
    assert told[0][0] != told[1][0]


@pytest.mark.slow
def test_after_a_call_that_may_replace_weights_the_store_is_not_used(ask, baseline, tmp_path):
    tier = tier_of(tmp_path / "kv")
    ask([{"prompts": PROMPTS}], tier)
    told = ask([{"rpc": "reload_weights"}, {"prompts": PROMPTS}], tier)
    assert ids(told["steps"][1]) == baseline
    assert [answer["cached"] for answer in told["steps"][1]] == [0, 0]


@pytest.mark.slow
def test_mooncake_serves_a_second_process(ask, baseline, mooncake):
    stored_and_found(ask, baseline, {"type": "hicache", "backend": "mooncake", "options": mooncake.options()})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_mooncake_master_that_goes_away_in_the_middle_changes_no_answer(
    ask, baseline, mooncake, how, tmp_path
):
    tier = {"type": "hicache", "backend": "mooncake", "options": mooncake.options(), "timeout_s": 2.0}
    ask([{"prompts": PROMPTS}], tier)
    gone = {"signal": {"kill": 9, "pause": 19}[how], "pids": mooncake.master_pids()}
    told = ask([{"prompts": PROMPTS[:1]}, gone, {"prompts": PROMPTS}], tier)
    before, _, after = told["steps"]
    assert before[0]["cached"] // BLOCK == before[0]["prompt"] // BLOCK
    assert ids(before) == baseline[:1]
    assert ids(after) == baseline
    assert max(answer["seconds"] for answer in after) < 30


@pytest.fixture
def mooncake(program):
    from hicache_mooncake.harness import MooncakeHarness

    harness = MooncakeHarness({"checksum": True})
    reason = harness.available()
    if reason:
        pytest.skip(reason)
    harness.start()
    harness.master_pids = lambda: harness._running().pids
    yield harness
    harness.stop()

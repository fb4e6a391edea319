"""A real sgl.Engine of SGLang 0.5.23 on a CPU: the prefix comes from storage, the answers stay the same."""

from __future__ import annotations

import json

import pytest
from cpu_engine import PAGE, PROMPT, make_model
from sgl_toy import OPTIONS

pytestmark = pytest.mark.timeout(300)  # a whole engine is started, on a machine that may be busy

FULL_PAGES = len(PROMPT) // PAGE * PAGE
DYNAMIC = {"module_path": "hicache_sglang", "class_name": "HiCacheSGLang", "interface_v1": 1}
AGAIN = {"flush": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def ask(engine, model):
    def run(steps, backend=None, extra=None, *, timeout_s=280.0, model=model, made=None, **more):
        wanted = {"model": model, "backend": backend, "extra": extra or {}, "steps": steps} | (made or {})
        return json.loads(engine("cpu_engine.py", json.dumps(wanted), timeout_s=timeout_s, **more))

    return run


def test_after_a_flush_the_whole_prefix_comes_from_storage(ask, tmp_path):
    first, second = ask([{}, AGAIN], "hicache.file", {"options": {"root": str(tmp_path / "kv")}})
    assert (first["storage"], second["storage"], second["cached"]) == (0, FULL_PAGES, FULL_PAGES)
    assert second["ids"] == first["ids"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_second_process_and_another_way_in_find_the_pages_of_the_first(ask, tmp_path):
    options = {"options": {"root": str(tmp_path / "kv")}}
    (plain,) = ask([{}])
    (stored,) = ask([{}], "hicache.file", options)
    other_way = {"backend_name": "file"} | DYNAMIC | options
    (found,) = ask([{}], "dynamic", other_way, SGLANG_PLUGINS="hicache_cpu")
    assert plain["ids"] == stored["ids"] == found["ids"]
    assert (stored["storage"], found["storage"]) == (0, FULL_PAGES)
    assert found["storage"] >= 0.98 * FULL_PAGES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.clause("C10")
def test_every_request_is_answered_right_whatever_the_store_does_and_the_cache_comes_back(ask, tmp_path):
    mode = str(tmp_path / "mode")
    extra = DYNAMIC | {"backend_name": "dynamic", "timeout_s": 1.0, "options": OPTIONS | {"mode_file": mode}}
    faults = ("raise", "hang", "short", "damaged", "dead", "full")
    steps = [{}]
    for fault in faults:
        steps += [AGAIN | {"write": {mode: fault}}, AGAIN | {"write": {mode: ""}, "until_storage": 45}]
    answers = ask(steps, "dynamic", extra, timeout_s=280.0)
    assert [answer["ids"] for answer in answers] == [answers[0]["ids"]] * len(steps)
    during = dict(zip(faults, [answer["storage"] for answer in answers[1::2]], strict=True))
    after = dict(zip(faults, [answer["storage"] for answer in answers[2::2]], strict=True))
    assert during == dict.fromkeys(faults, 0) | {"full": FULL_PAGES}
    assert after == dict.fromkeys(faults, FULL_PAGES)
    assert max(answer["seconds"] for answer in answers[1::2]) < 10


@pytest.mark.slow
def test_after_a_weight_update_no_page_of_the_old_weights_is_served(ask, tmp_path):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    extra = {"options": {"root": str(tmp_path / "kv")}}
    steps = [{}, AGAIN, {"update": new}, AGAIN, {"update": old}]
    answers = ask(steps, "hicache.file", extra, made={"weights": {old: 1, new: 2}}, model=old)
    assert [answer["storage"] for answer in answers] == [0, FULL_PAGES, 0, FULL_PAGES, FULL_PAGES]
    ids = [answer["ids"] for answer in answers]
    assert ids[0] == ids[1] == ids[4]
    assert ids[2] == ids[3] != ids[0]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_each_lora_adapter_has_pages_of_its_own_and_other_content_under_its_name_has_others(ask, tmp_path):
    model, a, b = (str(tmp_path / name) for name in ("model", "a", "b"))
    extra = {"options": {"root": str(tmp_path / "kv")}}
    made = {"weights": {model: 1}, "adapters": {"a": (a, 11), "b": (b, 22)}}
    names = [None, "a", "b"]
    plain = ask([{"lora": name} for name in names], model=model, made=made)
    wanted = {name: answer["ids"] for name, answer in zip(names, plain, strict=True)}
    assert len({tuple(ids) for ids in wanted.values()}) == 3

    steps = [{"flush": 1, "lora": name} for name in names * 2]
    answers = ask(steps, "hicache.file", extra, model=model, made=made)
    assert [answer["ids"] for answer in answers] == [wanted[name] for name in names * 2]
    assert [answer["storage"] for answer in answers] == [0] * 3 + [FULL_PAGES] * 3

    retrained = made | {"adapters": {"a": (a, 33), "b": (b, 22)}}
    fresh, again = ask(
        [{"lora": "a"}, {"flush": 1, "lora": "a"}], "hicache.file", extra, model=model, made=retrained
    )
    assert (fresh["storage"], again["storage"]) == (0, FULL_PAGES)
    assert fresh["ids"] == again["ids"] != wanted["a"]

"""The pytest side: three lines run the suite, refusals are tried, what is missing is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

THREE_LINES = """
from hicache_conformance import Conformance
class TestConformance(Conformance):
    backend = "{backend}"
    options = {options}
"""


def _run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_plugin_three_lines_run_the_cases_and_sum_up_by_level(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=THREE_LINES.format(backend="memory", options="{'store': 'mine'}"))
    result = _run(pytester, "-k", "c13 or c14_pages", "--hicache-seed=3")
    result.assert_outcomes(passed=6, skipped=6, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(
        ["core       reached      6 pass", "durable    unsupported  4 unsupported", "seed 3"]
    )


def test_plugin_backend_option_runs_the_suite_anywhere(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        "--hicache-backend=memory",
        "--hicache-option=store=x",
        "--hicache-level=batch",
        "-k",
        "hole_at",
    )
    assert result.parseoutcomes()["passed"] == 8
    assert result.ret == 0


def test_plugin_a_failing_backend_fails_with_the_bytes_named(pytester: pytest.Pytester) -> None:
    result = _run(pytester, "--hicache-subject=mutant=shifted_hole", "-k", "hole_at_3")
    result.assert_outcomes(failed=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["batch      NOT reached  1 fail"])


def test_plugin_an_undeclared_capability_is_tried_and_its_refusal_required(pytester: pytest.Pytester) -> None:
    result = _run(pytester, "--hicache-subject=mutant=quiet_false", "-k", "c13_a_removed_key")
    result.assert_outcomes(errors=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*C13: 'remove' is not declared, and the verb answered * quietly*"])


UNAVAILABLE = """
from hicache_conformance import BaseHarness
class Missing(BaseHarness):
    def available(self):
        return "acme_server is not on PATH"
"""

CONFTEST = """
from dataclasses import replace
from hicache_conformance import subject
from missing import Missing
found = subject.find_subject
subject.find_subject = lambda reference: replace(found(reference), harness=Missing)
import hicache_conformance.plugin
hicache_conformance.plugin.find_subject = subject.find_subject
"""


@pytest.mark.parametrize(("flags", "outcome"), [((), "skipped"), (("--hicache-required",), "errors")])
def test_plugin_a_missing_prerequisite_is_not_run_and_fails_where_required(
    pytester: pytest.Pytester, flags: tuple[str, ...], outcome: str
) -> None:
    pytester.makepyfile(
        missing=UNAVAILABLE, conftest=CONFTEST, test_it=THREE_LINES.format(backend="memory", options="{}")
    )
    result = _run(pytester, "-k", "set_then_get", "-rsf", *flags)
    assert result.parseoutcomes()[outcome] == 1
    result.stdout.fnmatch_lines(["*not-run*acme_server is not on PATH*"])


TWO_BACKENDS = """
from hicache_conformance import Conformance
class TestGood(Conformance):
    backend, options = "memory", {"store": "good"}
class TestBroken(Conformance):
    backend = "mutant=set_stores_nothing"
"""


def test_plugin_two_backends_in_one_run_are_summed_up_apart(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=TWO_BACKENDS)
    result = _run(pytester, "-k", "set_then_get")
    result.assert_outcomes(passed=1, failed=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(
        [
            "test_it.py::TestGood:",
            "core       reached      1 pass",
            "test_it.py::TestBroken:",
            "core       NOT reached  1 fail",
        ]
    )


OWN_SUBJECT = """
from dataclasses import replace
from hicache_conformance import Conformance
from hicache_conformance.subject import find_subject
class TestForeign(Conformance):
    subject = replace(find_subject("memory"), name="foreign", reference="")
"""


def test_plugin_a_subject_of_ones_own_runs_and_what_needs_to_find_it_is_not_run(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_it=OWN_SUBJECT)
    result = _run(pytester, "-k", "set_then_get or c16 or second_process_sees", "-rs")
    result.assert_outcomes(passed=1, skipped=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*not-run: no other process can find this subject*"])


NARROW = """
from dataclasses import replace
from hicache_conformance import Conformance
from hicache_conformance.memory.options import MemoryOptions
from hicache_conformance.memory.spec import SPEC
from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.subject import find_subject

class Narrow(MemoryStorage):
    spec = replace(SPEC, capabilities=replace(
        SPEC.capabilities, max_batch=40, max_segments=4, max_page_nbytes=1 << 17, needs_registered=True
    ))
    def _check(self, keys, locs, *, writes_slots=False):
        assert len(keys) <= 40 and locs.nbytes <= 1 << 17 and locs.segments_per_page <= 4
        super()._check(keys, locs, writes_slots=writes_slots)
    def batch_contains(self, keys):
        assert len(keys) <= 40
        return super().batch_contains(keys)

class TestNarrow(Conformance):
    subject = replace(
        find_subject("memory"),
        name="narrow",
        spec=Narrow.spec,
        create=lambda config, options: Narrow(config, MemoryOptions(**options)),
        reference="",
    )
"""


@pytest.mark.slow
def test_plugin_declared_limits_are_kept_by_every_case(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=NARROW)
    result = _run(
        pytester, *(f"--hicache-level={name}" for name in ("core", "batch", "memory", "evict", "threads"))
    )
    assert result.ret == 0
    lines = [line.split()[:2] for line in result.outlines if "pass" in line and "reached" in line]
    assert lines == [[name, "reached"] for name in ("core", "batch", "memory", "evict", "threads")]


def test_plugin_without_a_backend_says_what_to_set(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="from hicache_conformance import Conformance\nclass TestIt(Conformance): pass"
    )
    result = _run(pytester, "-k", "set_then_get")
    result.stdout.fnmatch_lines(["*set `backend` on the class, or pass --hicache-backend NAME*"])
    assert result.ret != 0


def test_plugin_a_bad_option_text_is_a_usage_error(pytester: pytest.Pytester) -> None:
    result = _run(pytester, "--hicache-backend=memory", "--hicache-option=store", "-k", "set_then_get")
    result.stdout.fnmatch_lines(["*an option is written k=v, not 'store'*"])
    assert result.ret != 0


def test_plugin_leaves_other_tests_alone_and_does_not_load_the_suite(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_other="""
        import sys
        def test_b(): assert "hicache_conformance.conformance" not in sys.modules
        def test_a(): assert "hypothesis.stateful" not in sys.modules
        """
    )
    result = _run(pytester, "-v")
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*hicache conformance*")
    result.stdout.fnmatch_lines(["*test_b PASSED*", "*test_a PASSED*"])


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hicache_conformance", ["pytest", "hypothesis", "pydantic", "click", "hicache_core"]),
        ("hicache_conformance.memory.spec", ["pytest", "hypothesis", "pydantic", "click", "numpy", "torch"]),
        ("hicache_conformance.memory.storage", ["pytest", "hypothesis", "click", "numpy", "torch"]),
        ("hicache_conformance.command", ["hicache_file", "numpy", "torch", "pydantic"]),
    ],
)
def test_light_modules_load_nothing_heavy(module: str, absent: list[str]) -> None:
    program = f"import {module}, sys; print([name for name in {absent!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"

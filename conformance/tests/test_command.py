"""``hicache check``: its exit status, its reasons in one line, its reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from hicache_conformance.command import check
from hicache_conformance.report import headline

ONE_CASE = ["--level", "core", "--match", "test_c3_set_then_get_gives_the_page", "--seed", "5"]


def _check(*arguments: str) -> Result:
    return CliRunner().invoke(check, list(arguments))


def test_command_all_passed_is_status_0_and_every_report_is_written(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    result = _check("memory", *ONE_CASE, *options)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("core       reached      1 pass\n")
    report = json.loads(files["json"].read_text())
    assert (report["schema"], report["seed"], report["exit_status"], report["unusable"]) == (1, 5, 0, None)
    assert report["levels"] == {
        "core": {"verdict": "reached", "counts": {"pass": 1, "fail": 0, "unsupported": 0, "not-run": 0}}
    }
    suites = ElementTree.fromstring(files["junit"].read_text())
    assert [(suite.get("name"), suite.get("tests"), suite.get("failures")) for suite in suites] == [
        ("core", "1", "0")
    ]
    page = files["html"].read_text()
    assert 'aria-label="hicache: 1/1 levels"' in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_command_a_failed_case_is_status_1_and_is_told_with_its_clause(tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    result = CliRunner().invoke(
        check, ["--subject", "mutant=set_stores_nothing", *ONE_CASE, "--junit", str(junit)]
    )
    assert result.exit_code == 1, result.output
    assert result.output.startswith(
        "fail core: test_c3_set_then_get_gives_the_page (C3, C2)\n     AssertionError"
    )
    assert "core       not reached  1 fail" in result.output
    (suite,) = ElementTree.fromstring(junit.read_text())
    assert (suite.get("failures"), suite[0].get("classname"), suite[0][0].tag) == (
        "1",
        "hicache.core",
        "failure",
    )


@pytest.mark.parametrize(
    ("detail", "line"),
    [
        ("levels/core.py:9: in test\n    f()\nE   assert 1 == 2\nE    +  where\n", "assert 1 == 2"),
        (
            "still running after 6 s: killed\nThread 1:\n  File x, line 3\noutput ends:\nE 12 at",
            "still running after 6 s: killed",
        ),
        ("the budget of 15 s was spent", "the budget of 15 s was spent"),
        ("", ""),
    ],
    ids=["assertion", "lost_with_stacks_and_output", "one_line", "nothing"],
)
def test_command_a_headline_is_what_was_wrong(detail: str, line: str) -> None:
    assert headline(detail) == line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["memroy"], "no backend named 'memroy'; installed:"),
        (["memory", "-o", "capacity=4 gigs", "-o", "store=x"], "1 option of 'memory' is not valid"),
        (["memory", "-o", "sever=/nowhere"], "sever is unknown (server?)"),
        (["memory", "-o", "eviction=sometimes"], "the memory server did not start"),
    ],
    ids=["unknown", "bad_value", "unknown_option", "server_does_not_start"],
)
def test_command_what_cannot_be_checked_is_status_2_with_one_line(arguments: list[str], reason: str) -> None:
    result = _check(*arguments, *ONE_CASE)
    assert result.exit_code == 2, result.output
    assert reason in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name one backend to check"),
        (["memory", "-o", "capacity"], "an option is written k=v, not 'capacity'"),
        (["memory", "--level", "cores"], "'cores' is not one of"),
        (["memory", "--match", "no_such_case"], "no case matches"),
    ],
    ids=["no_name", "option_without_value", "unknown_level", "nothing_matches"],
)
def test_command_wrong_use_is_status_2(arguments: list[str], reason: str) -> None:
    result = _check(*arguments)
    assert result.exit_code == 2, result.output
    assert reason in result.output


def test_command_a_report_that_cannot_be_written_is_status_2_before_anything_runs(tmp_path: Path) -> None:
    place = tmp_path / "no_such_folder" / "report.json"
    result = _check("memory", "--json", str(place), *ONE_CASE)
    assert result.exit_code == 2, result.output
    assert f"there is no folder for the report {place}" in result.output
    assert "1 pass" not in result.output


def test_command_an_unusable_run_still_writes_its_reports(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    result = _check("memroy", *options)
    assert result.exit_code == 2
    assert json.loads(files["json"].read_text())["unusable"].startswith("no backend named 'memroy'")
    assert ElementTree.fromstring(files["junit"].read_text())[0].get("errors") == "1"
    assert "no backend named" in files["html"].read_text()


def test_command_a_case_that_is_not_declared_leaves_its_level_reached() -> None:
    result = _check("memory", "-o", "store=x", "--level", "shared", "--level", "core", "--match", "c13")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["core", "reached", "6", "pass"]
    assert lines[1].split() == ["shared", "unsupported", "2", "unsupported"]


def test_command_another_distribution_adds_a_kind_of_subject_and_its_option(tmp_path: Path) -> None:
    (tmp_path / "acme_kind.py").write_text(
        "from dataclasses import replace\n"
        "from hicache_conformance.subject import find_subject\n"
        "def subject(text):\n"
        "    return replace(find_subject('memory'), name=text, reference=f'acme-class={text}')\n"
    )
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hicache.conformance.subjects]\nacme-class = acme_kind:subject\n")
    command = [sys.executable, "-m", "hicache_conformance", "--acme-class", "acme:Store"]
    command += [
        "--level",
        "shared",
        "--match",
        "second_process_sees",
        "--json",
        str(tmp_path / "report.json"),
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["subject"], report["backend"]["name"]) == ("acme-class=acme:Store", "acme:Store")
    assert [case["outcome"] for case in report["cases"]] == ["pass"]


def test_command_two_subjects_are_refused() -> None:
    result = _check("memory", "--subject", "mutant=prints")
    assert result.exit_code == 2
    assert "name one backend to check, not 2 things: mutant=prints, backend=memory" in result.output


def test_command_help_names_every_level() -> None:
    result = _check("--help")
    assert result.exit_code == 0
    for word in ("core", "batch", "memory", "lifecycle", "identity", "shared", "durable", "evict", "fault"):
        assert word in result.output


def test_command_a_kind_with_a_dash_in_its_name_is_an_option(tmp_path: Path) -> None:
    folder = tmp_path / "acme-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[hicache.conformance.subjects]\nacme-class = acme:subject\n")
    script = "from hicache_conformance.command import check; check(['--help'])"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, "--acme-class VALUE" in done.stdout, done.stderr) == (0, True, "")

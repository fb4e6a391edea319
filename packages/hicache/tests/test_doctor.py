"""Every failure is named with what to do about it, and makes the exit status 1."""

from __future__ import annotations

import sys

import pytest

from hicache_cli.distributions import owners_of


@pytest.fixture
def doctor(site, acme_source, run_json):
    """Install the acme backend with parts replaced, examine it, and give the checks by name."""

    def examine(*arguments, fails, **parts):
        site.backend("acme", acme_source(**parts))
        report = run_json("doctor", "acme", *arguments, exit_code=1 if fails else 0)
        assert report["ok"] is not fails
        assert [c["name"] for c in report["checks"] if c["ok"] is False] == ([fails] if fails else [])
        assert all(check["remedy"] for check in report["checks"] if check["ok"] is False)
        return {check["name"]: check for check in report["checks"]}

    return examine


def test_a_backend_that_works_passes_every_check(doctor):
    checks = doctor(fails="")
    assert [name for name, check in checks.items() if check["ok"]] == [
        "versions",
        "plugin",
        "options",
        "opening",
        "round trip",
    ]
    assert checks["round trip"]["found"] == "4 pages of 64 KiB, every byte as set"


def test_text_output_ends_with_the_verdict_and_exit_status(run, site, acme_source):
    site.backend("acme", acme_source())
    good = run("doctor", "acme")
    assert (good.exit_code, good.output.splitlines()[-1]) == (0, "All 5 checks passed.")
    bad = run("doctor", "acme", "--option", "streams=0")
    assert bad.exit_code == 1
    assert bad.output.splitlines()[-1] == "1 of 3 checks failed."
    assert "FAIL acme: options: 1 option of 'acme' is not valid: streams='0': " in bad.output
    assert "See: hicache show acme" in bad.output


def test_an_unknown_backend_fails_with_its_pip_line(run_json, monkeypatch):
    monkeypatch.setattr("hicache_core.registry.INSTALL_HINTS", {"hinted": "pip install hinted"})
    report = run_json("doctor", "hinted", exit_code=1)
    assert report["checks"][-1] == {
        "backend": "hinted",
        "name": "plugin",
        "ok": False,
        "found": "'hinted' is not installed.",
        "remedy": "Run: pip install hinted",
    }


def test_a_missing_module_comes_with_pip_and_apt(doctor):
    requires = 'Requirement(module="no_such_native", pip="pip install acme[x]", apt="libacme1"),'
    checks = doctor(fails="module no_such_native", requires=requires)
    assert list(checks) == ["versions", "plugin", "module no_such_native"]  # nothing is tried without it
    check = checks["module no_such_native"]
    assert check["found"] == "ModuleNotFoundError: No module named 'no_such_native'"
    assert check["remedy"] == "Run: pip install acme[x]; apt-get install libacme1"


def test_a_module_that_kills_its_process_kills_only_that(doctor, site):
    (site.folder / "fake_deadly.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    check = doctor(fails="module fake_deadly", requires='Requirement(module="fake_deadly"),')[
        "module fake_deadly"
    ]
    assert check["found"] == "importing it ended the process with signal 11"


def test_a_version_out_of_range_is_named_with_the_range(doctor, site):
    site.install("acme-native", "0.9", modules={"fake_native/__init__.py": ""})
    requires = 'Requirement(module="fake_native", pip="pip install acme-native", versions=">=1.0,<2"),'
    check = doctor(fails="module fake_native", requires=requires)["module fake_native"]
    assert check["found"] == "acme-native 0.9, where >=1.0,<2 is wanted"


def test_a_version_in_range_passes(doctor, site):
    site.install("acme-native", "1.5", modules={"fake_native/__init__.py": ""})
    checks = doctor(fails="", requires='Requirement(module="fake_native", versions=">=1.0,<2"),')
    assert checks["module fake_native"]["found"] == "acme-native 1.5"


def test_two_distributions_that_wrote_one_file_are_a_failure(doctor, site):
    site.install("acme-native", "1.0", modules={"fake_native/__init__.py": ""})
    site.install("acme-native-cuda", "1.1", modules={"fake_native/__init__.py": ""})
    check = doctor(fails="one owner of fake_native", requires='Requirement(module="fake_native"),')[
        "one owner of fake_native"
    ]
    assert check["found"] == (
        "2 distributions own the import package 'fake_native': acme-native 1.0, acme-native-cuda 1.1 "
        "(both wrote fake_native/__init__.py)"
    )
    assert check["remedy"].startswith("Run: pip uninstall acme-native acme-native-cuda; ")


def test_a_namespace_package_may_have_several_owners(site):
    site.install("one", modules={"fake_space/one.py": ""})
    site.install("two", modules={"fake_space/two.py": ""})
    owners = owners_of(["fake_space"])["fake_space"]
    assert (owners.versions, owners.contested) == ({"one": "1.0", "two": "1.0"}, {})


def test_one_distribution_seen_twice_owns_its_package_once(site, tmp_path, monkeypatch):
    site.install("one", modules={"fake_once/__init__.py": ""})
    other = tmp_path / "other"
    site.install("One", modules={"fake_once/__init__.py": ""}, folder=other)
    monkeypatch.syspath_prepend(str(other))
    assert owners_of(["fake_once"])["fake_once"].contested == {}


def test_a_store_that_cannot_be_reached_fails_at_opening(doctor):
    away = 'import hicache_core; raise hicache_core.BackendUnavailable("no server", remedy="Start it.")'
    check = doctor(fails="opening", open=away)["opening"]
    assert (check["found"], check["remedy"]) == ("no server.", "Start it.")


def test_an_open_that_never_returns_is_left_behind(doctor):
    check = doctor("--timeout", "0.1", fails="opening", open="import threading; threading.Event().wait()")[
        "opening"
    ]
    assert check["found"] == "Overdue: no answer within 1.1 s"


def test_wrong_bytes_are_found(doctor):
    check = doctor(fails="get", damage="value[40_000] ^= 1")["get"]
    assert check["found"] == "pages [0, 1, 2, 3] of 4 came back with other bytes than were set"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        pytest.param("[Status.DENIED] * len(keys)", "answered DENIED, DENIED, DENIED, DENIED", id="denied"),
        pytest.param("[Status.OK]", "answered OK", id="short"),
        pytest.param("[]", "answered nothing", id="empty"),
        pytest.param("None", "TypeError: 'NoneType' object is not iterable", id="none"),
    ],
)
def test_a_set_that_is_not_ok_for_each_page_fails(doctor, answer, found):
    assert doctor(fails="set", set=f"return {answer}")["set"]["found"] == found


def test_a_store_that_says_it_has_everything_is_found_out(site, acme_source, run_json):
    lies = "return [Status.OK for key in keys]"
    source = acme_source().replace(
        "return [Status.OK if key in self.pages else Status.MISS for key in keys]", lies
    )
    site.backend("acme", source)
    bad = [check for check in run_json("doctor", "acme", exit_code=1)["checks"] if check["ok"] is False]
    assert [(check["name"], check["found"]) for check in bad] == [
        ("contains", "says OK for a page that nobody set")
    ]


def test_a_backend_that_tries_to_exit_is_a_failure(doctor):
    check = doctor(fails="set", set="raise SystemExit(0)")["set"]
    assert check["found"] == "RuntimeError: it tried to end the process: SystemExit(0)"


def test_a_store_that_keeps_everything_gets_a_remark(doctor):
    checks = doctor(fails="", capabilities='deadline="cancel"')
    assert checks["removing"]["ok"] is None
    assert checks["removing"]["found"].startswith("cannot remove or clear: 4 pages stay in namespace ")


def test_a_folder_is_made_and_removed_where_none_is_set(doctor):
    note = doctor(fails="", options="root: str = '/nowhere'")["place"]["found"]
    folder = note.split("temporary folder ")[1].split(",")[0]
    assert folder.startswith("/")
    import os

    assert not os.path.exists(folder)


def test_the_plugin_s_own_checks_are_run(site, acme_source, run_json):
    source = """
        def checks(options):
            yield "disk", True, "fast", ""
            yield "link", None, "1 Gb/s", ""
            yield f"streams {options.streams}", False, "too few", "Raise streams."
    """
    site.backend("acme", acme_source())
    site.install(
        "acme-doctor",
        entry_points={"hicache.doctor": {"acme": "fake_acme_doctor:checks"}},
        modules={"fake_acme_doctor.py": source},
    )
    report = run_json("doctor", "acme", exit_code=1)
    own = [tuple(c.values())[1:] for c in report["checks"] if c["name"] in ("disk", "link", "streams 4")]
    assert own == [
        ("disk", True, "fast", ""),
        ("link", None, "1 Gb/s", ""),
        ("streams 4", False, "too few", "Raise streams."),
    ]


def test_a_plugin_s_own_checks_that_raise_are_one_failure(site, acme_source, run_json):
    site.backend("acme", acme_source())
    site.install("acme-doctor", entry_points={"hicache.doctor": {"acme": "fake_no_such_module:checks"}})
    report = run_json("doctor", "acme", exit_code=1)
    (bad,) = [check for check in report["checks"] if check["ok"] is False]
    assert bad["name"] == "the plugin's own checks"
    assert "ModuleNotFoundError" in bad["found"]


def test_without_a_name_every_backend_is_examined_and_missing_allowed_ones_fail(
    run_json, site, acme_source, monkeypatch
):
    site.backend("acme", acme_source())
    site.backend("broken", "raise RuntimeError('half installed')")
    monkeypatch.setenv("HICACHE_BACKENDS_ALLOW", "acme,broken,ghost")
    report = run_json("doctor", exit_code=1)
    bad = {(c["backend"], c["name"]) for c in report["checks"] if c["ok"] is False}
    assert bad == {("ghost", "installed"), ("broken", "plugin")}
    assert ("acme", "round trip") in {(c["backend"], c["name"]) for c in report["checks"] if c["ok"]}


def test_options_need_a_name(run):
    assert run("doctor", "--option", "a=b").exit_code == 2


def test_the_exit_status_of_the_process_is_1(program, site, acme_source):
    site.backend("acme", acme_source(set="return [Status.NO_SPACE] * len(keys)"))
    done = program("doctor", "acme")
    assert done.returncode == 1
    assert "Make room, or raise the backend's capacity." in done.stdout
    assert sys.executable  # the same interpreter ran it

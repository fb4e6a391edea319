from __future__ import annotations

import sys

from hicache_cli.main import COMMAND_GROUP, OWN

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_own_commands_are_the_distribution_s_entry_points(repository):
    """As pyproject.toml has them: an editable installation may remember those of an older checkout."""
    text = (repository / "packages" / "hicache" / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"][COMMAND_GROUP]
    assert points == {name: own.target for name, own in OWN.items()}


def test_help_lists_commands_of_other_distributions_and_imports_none(run, site):
    site.install(
        "hicache-extra",
        "2.0",
        entry_points={COMMAND_GROUP: {"extra": "fake_extra_command:extra"}},
        modules={"fake_extra_command.py": "raise RuntimeError('imported')"},
    )
    result = run("--help")
    assert result.exit_code == 0
    for name in (*OWN, "extra"):
        assert f"\n  {name}" in result.output
    assert "(from hicache-extra 2.0)" in result.output
    assert "fake_extra_command" not in sys.modules


def test_a_command_of_another_distribution_runs(run, site):
    site.install(
        "hicache-extra",
        entry_points={COMMAND_GROUP: {"extra": "fake_good_command:extra"}},
        modules={"fake_good_command.py": "import click\nextra = click.command()(lambda: click.echo('ran'))"},
    )
    assert run("extra").output == "ran\n"


def test_a_command_that_cannot_be_imported_names_its_distribution(run, site):
    site.install(
        "hicache-extra",
        "2.0",
        entry_points={COMMAND_GROUP: {"extra": "fake_bad_command:extra"}},
        modules={"fake_bad_command.py": "raise RuntimeError('broken build')"},
    )
    result = run("extra")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: command 'extra' of hicache-extra 2.0 cannot be loaded: RuntimeError: broken build. "
        "Reinstall that distribution, or uninstall it.\n"
    )


def test_a_command_that_is_none_is_refused(run, site):
    site.install(
        "hicache-extra",
        entry_points={COMMAND_GROUP: {"extra": "fake_no_command:extra"}},
        modules={"fake_no_command.py": "extra = 5"},
    )
    result = run("extra")
    assert result.exit_code == 1
    assert "is not a click command: fake_no_command:extra is a int" in result.stderr


def test_an_own_command_cannot_be_taken_over(run, site):
    site.install(
        "hicache-extra",
        entry_points={COMMAND_GROUP: {"backends": "fake_thief_command:backends"}},
        modules={
            "fake_thief_command.py": "import click\nbackends = click.command()(lambda: click.echo('thief'))"
        },
    )
    assert "thief" not in run("backends").output
    assert "hicache-extra" not in run("--help").output


def test_unknown_command_is_a_usage_error(run):
    assert run("backend").exit_code == 2


def test_version_names_the_command_and_core(run):
    assert run("--version").output.startswith("hicache 0.")


def test_an_error_is_one_message_with_exit_status_1(program):
    done = program("show", "moncake")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: no backend named 'moncake'; installed: ")
    assert done.stderr.endswith("Did you mean 'mooncake'?\n")


def test_an_error_with_json_is_json_on_stdout_as_well(run_json, monkeypatch):
    monkeypatch.setattr("hicache_core.registry.INSTALL_HINTS", {"hinted": "pip install hinted"})
    assert run_json("show", "hinted", exit_code=1) == {
        "error": {
            "type": "BackendNotFound",
            "message": "'hinted' is not installed. Run: pip install hinted",
            "remedy": "Run: pip install hinted",
        }
    }

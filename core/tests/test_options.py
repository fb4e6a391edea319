"""Options: where each value comes from, sizes, and every problem told at once without its secrets."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from hicache_core.errors import InvalidOptions
from hicache_core.options import Options, Size, environment_name, is_secret, parse_size, resolve, shown


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid")

    user: str
    token: SecretStr
    retries: int = Field(default=1, ge=0)


class AcmeOptions(Options):
    segment_size: Size = 64 << 20
    protocol: str = "tcp"
    port: int = Field(default=80, ge=1, le=65535)
    token: SecretStr | None = None
    tags: list[str] = []  # noqa: RUF012 - pydantic copies it
    login: Login | None = None
    endpoints: dict[str, SecretStr] = {}  # noqa: RUF012 - pydantic copies it


def acme(explicit: dict[str, Any] | None = None, **environment: str) -> AcmeOptions:
    options = resolve("acme", AcmeOptions, explicit or {}, environment=environment).options
    assert isinstance(options, AcmeOptions)
    return options


def problems(explicit: dict[Any, Any] | None = None, **environment: str) -> InvalidOptions:
    with pytest.raises(InvalidOptions) as caught:
        resolve("acme", AcmeOptions, explicit or {}, environment=environment)
    return caught.value


def a_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hicache.toml"
    path.write_text(textwrap.dedent(text))
    return str(path)


# Sizes.


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (1 << 70, 1 << 70),
        (10**400, 10**400),
        ("0", 0),
        ("4096", 4096),
        ("64b", 64),
        ("64kb", 64_000),
        ("64k", 64_000),
        ("64mb", 64_000_000),
        ("64MB", 64_000_000),
        ("64mib", 64 << 20),
        ("64Mi", 64 << 20),
        ("1.5GiB", 3 << 29),
        (" 2 TiB ", 2 << 40),
        ("1.5", 2),
        ("0.1kib", 102),
    ],
)
def test_a_size_is_read(text: Any, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4 gigs", "'4 gigs' is not a size (try \"4GiB\")"),
        ("1.5 megabyte", "'1.5 megabyte' is not a size (try \"1.5MiB\")"),
        ("", "'' is not a size (try \"4GiB\")"),
        ("   ", "'   ' is not a size (try \"4GiB\")"),
        ("lots", "'lots' is not a size (try \"4GiB\")"),
        ("-1", "'-1' is not a size (try \"4GiB\")"),
        ("1,5gb", "'1,5gb' is not a size (try \"4GiB\")"),
        ("1e3", "'1e3' is not a size (try \"4GiB\")"),
        ("1_000", "'1_000' is not a size (try \"4GiB\")"),
        ("٣gb", "'٣gb' is not a size (try \"4GiB\")"),
        ("4gb\x00", "'4gb\\x00' is not a size (try \"4GiB\")"),
        ("1pb", "'1pb' is not a size (try \"4GiB\")"),
        (-1, "-1 is negative; a size is 0 or more bytes"),
        (True, 'True is not a size (try "4GiB")'),
        (1.5, '1.5 is not a size (try "4GiB")'),
        (None, 'None is not a size (try "4GiB")'),
        ([], '[] is not a size (try "4GiB")'),
        (b"4gb", "b'4gb' is not a size (try \"4GiB\")"),
    ],
)
def test_nonsense_is_no_size(text: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["9" * 400 + ".5gb", "9" * 5000, "1" + "0" * 4400 + "kb"])
def test_a_number_beyond_all_machines_is_no_size(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert str(caught.value).endswith(' is not a size (try "4GiB")')
    assert len(str(caught.value)) < 100


@given(st.integers(0, 10**15), st.sampled_from(["", "b", "kb", "kib", "mb", "mib", "gb", "gib", "tb", "tib"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    factor = base ** ("kmgt".index(unit[0]) + 1) if unit and unit[0] in "kmgt" else 1
    assert parse_size(f"{number}{unit}") == number * factor
    assert parse_size(f"{number} {unit.upper()}") == number * factor


# Where a value comes from.


def test_explicit_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = a_file(tmp_path, '[acme]\nport = 1\nprotocol = "file"\nsegment_size = "1kib"\n')
    sourced = resolve(
        "acme",
        AcmeOptions,
        {"port": 3},
        environment={
            "HICACHE_CONFIG": path,
            "HICACHE_ACME_PORT": "2",
            "HICACHE_ACME_PROTOCOL": "environment",
        },
    )
    assert sourced.options.model_dump(include={"port", "protocol", "segment_size", "tags"}) == {
        "port": 3,
        "protocol": "environment",
        "segment_size": 1024,
        "tags": [],
    }
    assert {
        name: sourced.sources[name] for name in ("port", "protocol", "segment_size", "tags", "bounce")
    } == {
        "port": "explicit",
        "protocol": "HICACHE_ACME_PROTOCOL",
        "segment_size": f"{path} line 4",
        "tags": "default",
        "bounce": "default",
    }


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_ACME_PORT", "81")
    monkeypatch.delenv("HICACHE_CONFIG", raising=False)
    options = resolve("acme", AcmeOptions, {}).options
    assert options.model_dump()["port"] == 81


def test_text_of_the_environment_becomes_what_the_field_holds() -> None:
    options = acme(
        HICACHE_ACME_TAGS='["a", "b"]',
        HICACHE_ACME_LOGIN='{"user": "u", "token": "t"}',
        HICACHE_ACME_BOUNCE="true",
        HICACHE_ACME_SEGMENT_SIZE="2mib",
    )
    assert (options.tags, options.bounce, options.segment_size) == (["a", "b"], True, 2 << 20)
    assert options.login is not None
    assert (options.login.user, options.login.token.get_secret_value()) == ("u", "t")


def test_a_neighbours_variables_are_not_taken_for_ones_own() -> None:
    environment = {"HICACHE_ACME_TWO_PORT": "9", "HICACHE_ACME_PORT": "8", "HICACHE_ACMES_X": "1"}
    options = resolve(
        "acme", AcmeOptions, {}, environment=environment, neighbours=["acme", "acme_two", "other"]
    ).options
    assert options.model_dump()["port"] == 8


def test_names_of_variables() -> None:
    assert environment_name("acme", "segment_size") == "HICACHE_ACME_SEGMENT_SIZE"


def test_an_empty_configuration_variable_names_no_file() -> None:
    assert acme(HICACHE_CONFIG="").port == 80


def test_a_file_without_the_table_gives_nothing(tmp_path: Path) -> None:
    assert acme(HICACHE_CONFIG=a_file(tmp_path, "[other]\nport = 1\n")).port == 80


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        acme().port = 1


# Problems: all at once.


def test_every_bad_option_is_told_at_once_with_close_matches_and_sources(tmp_path: Path) -> None:
    path = a_file(tmp_path, "# a comment\n[acme]\nport = 0\n")
    error = problems(
        {"protocl": "rdma", "tags": 3},
        HICACHE_CONFIG=path,
        HICACHE_ACME_SEGMENT_SIZE="4 gigs",
        HICACHE_ACME_XYZZY="1",
    )
    assert error.backend == "acme"
    assert error.problems == (
        ("segment_size", "segment_size: '4 gigs' is not a size (try \"4GiB\")", "HICACHE_ACME_SEGMENT_SIZE"),
        ("port", "port=0: input should be greater than or equal to 1", f"{path} line 3"),
        ("tags", "tags=3: input should be a valid list", ""),
        ("xyzzy", "xyzzy is unknown", "HICACHE_ACME_XYZZY"),
        ("protocl", "protocl is unknown (protocol?)", ""),
    )
    assert str(error) == (
        "5 options of 'acme' are not valid: segment_size: '4 gigs' is not a size (try \"4GiB\"); "
        "port=0: input should be greater than or equal to 1; tags=3: input should be a valid list; "
        "xyzzy is unknown; protocl is unknown (protocol?). "
        f"Set by: HICACHE_ACME_SEGMENT_SIZE, {path} line 3, HICACHE_ACME_XYZZY. See: hicache show acme"
    )


def test_one_bad_option_reads_as_one() -> None:
    error = problems({"port": "x"})
    assert str(error) == (
        "1 option of 'acme' is not valid: port='x': input should be a valid integer, "
        "unable to parse string as an integer. See: hicache show acme"
    )


@pytest.mark.parametrize("nonsense", ["4 gigs", -1, True, 1.5, "", None])
def test_a_size_of_nonsense_is_an_invalid_option(nonsense: Any) -> None:
    (problem,) = problems({"segment_size": nonsense}).problems
    assert problem[0] == "segment_size"


@pytest.mark.parametrize("size", ["9" * 400 + ".5gb", "9" * 5000])
def test_a_size_beyond_all_machines_is_an_invalid_option(size: str) -> None:
    (problem,) = problems({"segment_size": size}).problems
    assert problem[0] == "segment_size"


def test_names_that_are_no_text_are_told() -> None:
    assert problems({1: "x"}).problems == (("1", "keys should be strings", ""),)


class RequiredOptions(Options):
    url: str
    size: Size = 1

    @field_validator("url")
    @classmethod
    def _scheme(cls, url: str) -> str:
        if "://" not in url:
            raise ValueError(f"{url!r} has no scheme (try 'acme://{url}')")
        return url

    @model_validator(mode="after")
    def _together(self) -> RequiredOptions:
        if self.size == 7:
            raise ValueError("size and url do not fit each other")
        return self


@pytest.mark.parametrize(
    ("explicit", "problem"),
    [
        ({}, ("url", "url is required", "")),
        ({"url": "host"}, ("url", "url: 'host' has no scheme (try 'acme://host')", "")),
        ({"url": "a://b", "size": 7}, ("", "size and url do not fit each other", "")),
    ],
    ids=["missing", "a field's validator", "a model's validator"],
)
def test_requirements_of_a_plugin_are_told_in_its_words(
    explicit: dict[str, Any], problem: tuple[str, str, str]
) -> None:
    with pytest.raises(InvalidOptions) as caught:
        resolve("acme", RequiredOptions, explicit, environment={})
    assert caught.value.problems == (problem,)


def test_problems_inside_an_option_are_told_by_their_path() -> None:
    error = problems({"login": {"tokn": "x", "retries": -1}})
    assert error.problems == (
        ("login", "login.user is required", ""),
        ("login", "login.token is required", ""),
        ("login", "login.retries: input should be greater than or equal to 0", ""),
        ("login", "login.tokn is unknown", ""),
    )


# Secrets.

SECRET = "hunter2-very-secret"


@pytest.mark.parametrize(
    "explicit",
    [
        {"token": [SECRET]},
        {"token": 5, "login": {"user": "u", "token": [SECRET]}},
        {"login": {"token": SECRET}},
        {"login": {"user": 5, "token": SECRET}},
        {"login": {"user": "u", "token": SECRET, "retries": -1}},
        {"login": SECRET},
        {"login": [SECRET]},
        {"endpoints": {"a": [SECRET]}},
        {"endpoints": SECRET},
        {"endpoints": [SECRET]},
    ],
    ids=[
        *("list", "inner list", "inner missing", "inner wrong", "inner bound"),
        *("text for login", "list for login", "list in mapping", "text for mapping", "list for mapping"),
    ],
)
def test_no_error_shows_a_secret(explicit: dict[str, Any]) -> None:
    error = problems(explicit)
    assert SECRET not in str(error)
    assert SECRET not in repr(error)
    assert SECRET not in str(error.problems)
    assert SECRET not in str(error.__cause__)


@pytest.mark.parametrize("text", [f'{{"user": "u", "token": "{SECRET}"', f'["{SECRET}"]', SECRET])
def test_no_error_shows_a_secret_of_the_environment(text: str) -> None:
    assert SECRET not in str(problems(HICACHE_ACME_LOGIN=text))


def test_no_error_shows_a_secret_of_an_unreadable_file(tmp_path: Path) -> None:
    error = problems(HICACHE_CONFIG=a_file(tmp_path, f'[acme]\ntoken = "{SECRET}'))
    assert SECRET not in str(error)


def test_secrets_are_masked_where_options_are_shown() -> None:
    options = acme({"token": SECRET, "login": {"user": "u", "token": SECRET}, "endpoints": {"a": SECRET}})
    fields = AcmeOptions.model_fields
    assert SECRET not in repr(options)
    assert SECRET not in str(options)
    assert SECRET not in repr(resolve("acme", AcmeOptions, {"token": SECRET}, environment={}))
    assert shown(options.token, fields["token"]) == "********"
    assert shown(None, fields["token"]) == ""
    assert shown(options.port, fields["port"]) == "80"
    assert SECRET not in shown(options.login, fields["login"])
    assert SECRET not in shown(options.endpoints, fields["endpoints"])


def test_fields_that_hold_a_secret_anywhere_are_secret() -> None:
    secret = {name for name, field in AcmeOptions.model_fields.items() if is_secret(field)}
    assert secret == {"token", "login", "endpoints"}


# Files.


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[acme]\nport = 0\n", 2),
        ("[acme] # the store\n\nport = 0\n", 3),
        ('["acme"]\n"port" = 0\n', 2),
        ("port = 1\n[other]\nport = 2\n[ acme ]\n  port=0 # here\n[last]\nport = 3\n", 5),
        ("[acme.endpoints]\nport = 'x'\n[acme]\nport = 0\n", 4),
    ],
    ids=[
        "plain",
        "comment behind the table",
        "quoted",
        "among others",
        "sub-table first",
    ],
)
def test_the_line_of_a_bad_option_is_named(tmp_path: Path, text: str, line: int) -> None:
    path = a_file(tmp_path, text)
    (problem,) = problems(HICACHE_CONFIG=path).problems
    assert problem == ("port", "port=0: input should be greater than or equal to 1", f"{path} line {line}")


@pytest.mark.parametrize("text", ["acme.port = 0\n", "acme = { port = 0 }\n"], ids=["dotted", "inline"])
def test_an_unusual_file_is_named_without_a_line(tmp_path: Path, text: str) -> None:
    path = a_file(tmp_path, text)
    (problem,) = problems(HICACHE_CONFIG=path).problems
    assert problem[2] == path


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"[acme\n", "cannot be read: Expected ']'"),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (None, "cannot be read: [Errno 2] No such file or directory"),
    ],
    ids=["not TOML", "not text", "not there"],
)
def test_an_unreadable_file_is_told_by_its_name(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "hicache.toml"
    if content is not None:
        path.write_bytes(content)
    (problem,) = problems(HICACHE_CONFIG=str(path)).problems
    field, text, source = problem
    assert (field, source) == ("HICACHE_CONFIG", "HICACHE_CONFIG")
    assert text.startswith(f"the file '{path}' {complaint}")


def test_a_folder_for_a_file_is_told(tmp_path: Path) -> None:
    (problem,) = problems(HICACHE_CONFIG=str(tmp_path)).problems
    assert problem[1].startswith(f"the file '{tmp_path}' cannot be read: [Errno 21]")


def test_a_table_that_is_none_is_told(tmp_path: Path) -> None:
    path = a_file(tmp_path, "x = 1\nacme = 3\n")
    (problem,) = problems(HICACHE_CONFIG=path).problems
    assert problem == ("acme", f"'acme' in '{path}' is not a table; write [acme]", f"{path} line 2")


# Imports.


def test_core_loads_pydantic_for_options_only() -> None:
    script = (
        "import sys, hicache_core.factory; assert 'pydantic' not in sys.modules\n"
        "import hicache_core.options; assert 'pydantic' in sys.modules\n"
        "print('tomllib' in sys.modules, 'tomli' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["True", "False"] if sys.version_info >= (3, 11) else ["False", "True"])

"""The house's own lint: what no general linter knows about this repository.

Runs over whatever distributions the checkout holds, by reading their sources; only
the light modules are imported, each in a process of its own.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = sorted(
    file.parent
    for pattern in ("core", "conformance", "plugins/*", "packages/*")
    for file in ROOT.glob(f"{pattern}/pyproject.toml")
)
SOURCES = sorted(file for folder in DISTRIBUTIONS for file in folder.glob("src/**/*.py"))
#: All but the suite's mutants, each of which breaks one of these rules, or another, on purpose, and the
#: suite's probe of the process state, which is a process of its own and puts back what it was given.
WELL_BEHAVED = [
    file for file in SOURCES if "mutants" not in file.parts and not file.match("hicache_conformance/state.py")
]
TESTS = sorted(file for folder in [*DISTRIBUTIONS, ROOT] for file in folder.glob("tests/**/*.py"))

#: The budget of style, and the number above which there is no excuse.
SOFT_LINES, HARD_LINES = 400, 450

#: import package -> the hicache packages it may import besides itself; the layers, as a table.
LAYERS = {
    "hicache_core": set(),
    "hicache_conformance": {"hicache_core"},
    "hicache_cli": {"hicache_core"},
    "hicache_prometheus": {"hicache_core"},
    "hicache_sglang": {"hicache_core"},
    "hicache_vllm": {"hicache_core"},
    "hicache_engine": {"hicache_core"},
}
#: The modules that may import more than their layer, and what.
EXCEPTIONS = {
    "hicache_lmcache/radix.py": {"hicache_engine"},
    "hicache_engine/replay.py": {"hicache_cli"},  # adds an option to `hicache replay`, which alone imports it
    "hicache_nixl/seaweed.py": {"hicache_conformance"},  # the harness's server
    "hicache_mooncake/_servers.py": {"hicache_conformance"},  # the harness's servers
    "hicache_sglang/reverse.py": {
        "hicache_conformance"
    },  # puts SGLang's classes under the suite: extra [check]
}
#: Names of backends that core may know in its install hints alone.
BACKENDS = {"file", "mooncake", "nixl", "hf3fs", "aibrix", "eic", "lmcache"}
NEVER_LIGHT = ("torch", "numpy", "pydantic")


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def package_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[file.relative_to(ROOT).parts.index("src") + 1]


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def at(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"


def dotted(node: ast.AST) -> str:
    """The name that an expression spells, ``os.environ``; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def calls(file: Path, *names: str) -> list[str]:
    found = (node for node in ast.walk(tree(file)) if isinstance(node, ast.Call))
    return [at(file, node) for node in found if dotted(node.func) in names]


def imported(file: Path) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node, node.module


def test_every_distribution_is_whole():
    wanted = ("README.md", "CHANGELOG.md", "LICENSE", "changes", "tests", "src")
    missing = [f"{d.name}/{name}" for d in DISTRIBUTIONS for name in wanted if not (d / name).exists()]
    missing += [f"{d.name}: py.typed" for d in DISTRIBUTIONS if not list(d.glob("src/*/py.typed"))]
    assert missing == []


def test_every_distribution_has_the_licence_and_pythons_of_all():
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    odd = [d.name for d in DISTRIBUTIONS if (d / "LICENSE").read_text(encoding="utf-8") != licence]
    odd += [d.name for d in DISTRIBUTIONS if project(d)["requires-python"] != ">=3.10,<3.14"]
    assert odd == []


def test_every_distribution_names_a_range_of_core():
    bare = []
    for folder in DISTRIBUTIONS:
        for requirement in project(folder)["dependencies"]:
            name, _, version = requirement.partition(">=")
            if name.startswith("hicache") and "," not in version:
                bare.append(f"{folder.name}: {requirement}")
    assert bare == []


def test_no_signal_handler_is_installed():
    assert [hit for file in WELL_BEHAVED for hit in calls(file, "signal.signal")] == []


def test_no_module_prints():
    assert [hit for file in WELL_BEHAVED for hit in calls(file, "print")] == []


def test_no_module_writes_the_environment():
    changing = [f"os.environ.{verb}" for verb in ("update", "pop", "setdefault", "clear", "popitem")]
    hits = [hit for file in WELL_BEHAVED for hit in calls(file, *changing, "os.putenv", "os.unsetenv")]
    for file in WELL_BEHAVED:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                hits += [at(file, node)] if dotted(node.value) == "os.environ" else []
    assert hits == []


def test_no_test_sleeps():
    hits = [hit for file in TESTS for hit in calls(file, "time.sleep", "sleep")]
    assert hits == [], "wait for the condition instead: an Event, a deadline, a process"


def test_modules_keep_their_length():
    lengths = {str(f.relative_to(ROOT)): len(f.read_text(encoding="utf-8").splitlines()) for f in SOURCES}
    if long := {name: lines for name, lines in lengths.items() if lines > SOFT_LINES}:
        warnings.warn(f"above the budget of {SOFT_LINES} lines: {long}", stacklevel=1)
    assert {name: lines for name, lines in lengths.items() if lines > HARD_LINES} == {}


def test_layers_import_downwards_only():
    wrong = []
    for file in SOURCES:
        package = package_of(file)
        allowed = LAYERS.get(package, {"hicache_core"}) | {package}
        allowed |= EXCEPTIONS.get(f"{package}/{file.name}", set())
        if file.name == "harness.py":
            allowed |= {"hicache_conformance"}
        for node, module in imported(file):
            top = module.partition(".")[0]
            if top.startswith("hicache") and top not in allowed:
                wrong.append(f"{at(file, node)} imports {module}")
    assert wrong == []


def test_core_branches_on_no_backend():
    """A backend's name may stand in prose and in the registry's install hints, never in a decision."""
    hits = []
    for file in (f for f in SOURCES if package_of(f) == "hicache_core"):
        module = tree(file)
        prose = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
        for node in ast.walk(module):
            if isinstance(node, (ast.Compare, ast.match_case)):
                words = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                hits += [at(file, node.pattern if isinstance(node, ast.match_case) else node)] * any(
                    isinstance(word, str) and word in BACKENDS for word in words
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                named = set(re.findall(r"[a-z0-9]+", node.value)) & (BACKENDS - {"file"})
                hits += [at(file, node)] if named and file.name != "registry.py" else []
    assert hits == []


def light_modules() -> list[tuple[str, tuple[str, ...]]]:
    modules = [("hicache_core", (*NEVER_LIGHT, "importlib.metadata"))]
    for folder in DISTRIBUTIONS:
        specs = project(folder).get("entry-points", {}).get("hicache.backends", {})
        modules += [(target.partition(":")[0], NEVER_LIGHT) for target in specs.values()]
    return modules


@pytest.mark.parametrize(("module", "absent"), light_modules(), ids=[name for name, _ in light_modules()])
def test_light_module_loads_nothing_heavy(module, absent):
    program = (
        f"import sys; before = set(sys.modules); import {module}; "
        "sys.stdout.write(' '.join(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [name for name in done.stdout.split() if name in absent] == []

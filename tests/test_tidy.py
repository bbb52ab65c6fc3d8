"""House rules that no other tool checks, each with its reason and its escape."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from core.errors import Code

ROOT = Path(__file__).parents[1]
FUNCTION_LINES_MAX = 70
LUA_HEADER = ("KEYS", "ARGV", "RETURNS")
PRINTING = ("cli/", "benchmarks/", "tests/")


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in listed.stdout.split() if (path := ROOT / line).exists()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = tracked("*.py")
PRODUCT = [path for path in PYTHON if not name(path).startswith("tests/")]


def test_no_leftover_markers():
    # TODO with an owner is allowed; these two mean "not finished" and never ship.
    banned = re.compile(r"\b(FIX" + r"ME|XX" + r"X)\b")
    assert [name(p) for p in PYTHON if banned.search(p.read_text())] == []


def test_only_commands_print():
    prints = re.compile(r"^\s*print\(", re.MULTILINE)
    guilty = [
        name(path)
        for path in PRODUCT
        if not name(path).startswith(PRINTING) and path.name != "__main__.py"
        if prints.search(path.read_text())
    ]
    assert guilty == []


def test_every_module_says_what_it_is():
    silent = [
        name(path)
        for path in PYTHON
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_every_package_of_ours_is_named_as_ours():
    # Left to guess from folders and a cache, ruff has sorted one file two ways on two machines.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = settings["tool"]["ruff"]["lint"]["isort"]["known-first-party"]
    nested = {name(path).partition("/")[0] for path in PYTHON if "/" in name(path)}
    assert set(named) == nested - {"migrations"}


def test_there_is_no_drawer_for_oddments():
    banned = {"utils", "util", "helpers", "common", "misc"}
    assert [name(p) for p in PYTHON if banned & set(p.with_suffix("").parts)] == []


def test_only_the_transaction_commits():
    # One request or task is one transaction; a function that commits breaks its caller's.
    guilty = [
        name(path)
        for path in PRODUCT
        if re.search(r"\.commit\(|\bCOMMIT\b", path.read_text())
        and name(path) != "store/postgres.py"
    ]
    assert guilty == []


def test_every_lua_script_has_its_header_and_a_caller():
    keys = "\n".join(path.read_text() for path in tracked("store/*.py"))
    for path in tracked("*.lua"):
        head = path.read_text()[:3000]
        assert all(word in head for word in LUA_HEADER), name(path)
        assert f'"{path.stem}"' in keys, f"{name(path)} is called by nobody"


def test_every_sql_statement_is_used():
    code = "\n".join(path.read_text() for path in PYTHON)
    for path in tracked("store/sql/*.sql"):
        for statement in re.findall(r"^-- name: (\w+)", path.read_text(), re.MULTILINE):
            assert f'"{statement}"' in code, f"{name(path)}: {statement} is used by nobody"


def test_every_setting_and_error_code_is_documented():
    documented = "\n".join(path.read_text() for path in tracked("docs/*.md"))
    fields = [
        f"HEADWORKS_{field.upper()}"
        for path in tracked("*/settings.py")
        if name(path) != "core/settings.py"
        for field in re.findall(r"^    (\w+): ", path.read_text(), re.MULTILINE)
    ]
    missing = [word for word in [*Code, *fields] if f"`{word}`" not in documented]
    assert missing == []


@pytest.mark.parametrize("struct", ["protocol", "tickets", "metering", "fleet"])
def test_messages_are_frozen(struct):
    # A message that changes after it was sent is two messages.
    module = __import__(f"core.{struct}", fromlist=["*"])
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, msgspec.Struct):
            assert value.__struct_config__.frozen, value

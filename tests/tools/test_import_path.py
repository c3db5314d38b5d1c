"""Tools put the repository in the place of their own folder when they are run, and touch no path when imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.paths import ROOT

TOOLS = sorted((ROOT / "tools").rglob("*.py"))
IMPORT = """
import importlib, sys
sys.path[:0] = ["first of all"]
before = list(sys.path)
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert sys.path == before, f"{name}: {sys.path[:3]}"
"""


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Code that an import of a module runs: all but the bodies of functions and code only for a program."""
    for each in body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(each, ast.If) and ast.unparse(each.test) == "__name__ == '__main__'":
            yield from _at_import(each.orelse)
        elif inner := [part for field in ("body", "orelse", "finalbody") for part in getattr(each, field, [])]:
            yield from _at_import(inner)
        else:
            yield from ast.walk(each)


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.relative_to(ROOT / "tools")))
def test_no_tool_speaks_of_the_path_when_imported(path) -> None:
    found = [ast.unparse(each) for each in _at_import(ast.parse(path.read_text()).body) if hasattr(each, "lineno")]
    assert [each for each in found if each.startswith("sys.path")] == []


def test_importing_tools_leaves_the_path_as_it_was() -> None:
    """A few of each folder, which do not import DeepSpeed or transformers: seconds each."""
    names = [f"tools.{name}" for name in ("config", "report", "doctor", "data.where")]
    names += ["bench.launch.growth", "bench.step.shares", "bench.plan.step_times"]
    done = subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_tool_that_is_run_has_the_repository_in_the_place_of_its_folder(tmp_path) -> None:
    """From another folder, where nothing else leads to the package."""
    command = [sys.executable, str(ROOT / "tools" / "data" / "where.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--document" in done.stdout, done.stderr

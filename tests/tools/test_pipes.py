"""`tool | head`: a command whose reader has gone ends without a word, and not with status 0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

TOOLS = sorted(path for path in (ROOT / "tools").rglob("*.py") if "__main__" in path.read_text())


def unread(*arguments: str) -> tuple[str, int]:
    """Standard error and status of a command whose output is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen([sys.executable, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    return process.communicate(timeout=200)[1], process.returncode


@pytest.mark.tour
@pytest.mark.parametrize(
    "arguments",
    [
        ("config.py", "show", "configs/test/tiny_neox.yml"),
        ("config.py", "explain", "optimizer"),
        ("config.py", "layers", "configs/test/tiny_neox.yml", "--json"),
        ("data/batch.py", "--help"),
        ("checkpoint/inspect.py", "--help"),
        ("doctor.py", "--timeout", "0.001"),  # a line of its table is enough: no host answers
    ],
    ids=" ".join,
)
def test_nothing_is_said_of_a_closed_pipe(arguments):
    error, status = unread(f"tools/{arguments[0]}", *arguments[1:])
    assert status == 141 and "Traceback" not in error and "Broken pipe" not in error, error


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_tool_ends_so(path):
    text = path.read_text()
    assert any(each in text for each in ("piped(", "guarded(", "run_tool(")), "run main through megatron.pipes.piped"


def test_other_failures_are_still_told():
    code = "from megatron.pipes import piped\n\ndef main():\n    open('/nowhere/x')\n\npiped(main)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 1 and "FileNotFoundError" in process.stderr

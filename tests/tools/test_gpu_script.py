"""The one command for a lent GPU, on a CPU: rows of the speed table, and the page that they are written into."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = "before\n<!-- gpu.sh -->\nold\n<!-- end -->\nbetween\n<!-- measured: x -->\nkept\n<!-- end -->\n"


def gpu_script(folder: Path, page: Path, python: str | None = None) -> subprocess.CompletedProcess[str]:
    """Args:
    python: a script in the place of `python3`.
    """
    environment = {**os.environ, "DEVICE": "cpu", "SHAPES": "tiny llama-tiny", "ROUNDS": "1", "PAGE": str(page)}
    environment |= {"SEQUENCE": "32", "OMP_NUM_THREADS": "1"}
    if python is not None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python3").write_text(f"#!/bin/bash\n{python}\n")
        (folder / "bin" / "python3").chmod(0o755)
        environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    command = [ROOT / "tools" / "bench" / "gpu.sh", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder.parent)


def test_rows_are_written_into_the_page(tmp_path: Path):
    """Of a measuring program that answers with its shape (its fifth word)."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    done = gpu_script(tmp_path / "found", page, 'echo "a warning"; printf "| head |\\n| --- |\\n| $5 |\\n"')
    assert done.returncode == 0, done.stderr
    rows = "| head |\n| --- |\n| tiny |\n| llama-tiny |\n"
    assert (tmp_path / "found" / "speed.md").read_text() == rows == done.stdout
    assert page.read_text() == PAGE.replace("old\n", f"{rows}\ncpu.\n")


def test_what_cannot_be_measured_is_said_and_leaves_the_page(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    done = gpu_script(tmp_path / "found", page, "exit 3")
    assert done.returncode == 1 and page.read_text() == PAGE
    assert all(f"{shape}: see " in done.stderr for shape in ("tiny", "llama-tiny"))


@pytest.mark.slow  # compiles transformers' loops
def test_for_real(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    done = gpu_script(tmp_path / "found", page)
    assert done.returncode == 0, done.stderr
    assert "| llama-tiny | fp32 | 32 | 2 |" in page.read_text() and "old" not in page.read_text()

"""The README's commands, run in order in a copy of the source as a reader would, as they are printed.

An HTML comment before a block of the README says what to do with it:

    <!-- file: NAME -->      the block is the content of that file
    <!-- run -->             run it
    <!-- fails -->           run it. It must end with status 2
    <!-- prints -->          the block is what the failing command wrote
    <!-- hosts -->           it needs several hosts: tests/launch/runners/test_readme_on_hosts.py runs it
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT

README = ROOT / "README.md"
MARK = r"<!-- (?P<mark>file|run|fails|prints|hosts)(?:: (?P<name>[^\n]*?))? -->\n"
BLOCK = re.compile(rf"(?:{MARK})?```(?P<kind>\w*)\n(?P<text>.*?)```", re.DOTALL)
NOT_RUN = ("make quickstart", "deepy train pythia/160m", ". .venv/bin/activate", "pip install")
# tests/test_quickstart.py and tests/test_package.py have these.
COMMAND = """#!{python}
import sys

sys.path.insert(0, {folder!r})
from megatron.command.main import main

sys.exit(main())
"""


@dataclass(frozen=True)
class Block:
    mark: str | None
    name: str | None
    kind: str
    text: str


def blocks() -> list[Block]:
    return [Block(**match.groupdict()) for match in BLOCK.finditer(README.read_text(encoding="utf-8"))]


@pytest.fixture
def copy(tmp_path):
    """A copy of the source, with its command `deepy` in `bin`, a folder of texts and GPT-NeoX's files."""
    for name in ("megatron", "bench", "tools", "configs", "eval_tasks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("deepy.py", "train.py", "generate.py", "evaluate.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = tmp_path / "bin" / "deepy"
    command.parent.mkdir()
    command.write_text(COMMAND.format(python=sys.executable, folder=str(tmp_path)), encoding="utf-8")
    command.chmod(0o755)
    (tmp_path / "texts").mkdir()
    for number, path in enumerate(sorted((ROOT / "megatron").rglob("*.py"))[:80]):
        (tmp_path / "texts" / f"{number}.txt").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "old").mkdir()
    shutil.copy(ROOT / "tests" / "config" / "neox" / "20b.yml", tmp_path / "old" / "20B.yml")
    shutil.copy(ROOT / "tests" / "config" / "neox" / "20b_local.yml", tmp_path / "old" / "local_setup.yml")
    return tmp_path


def search_path(folder: Path) -> str:
    """PATH with the copy's `deepy` and this interpreter first."""
    return os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])


def shell(script: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PATH": search_path(folder), "CUDA_VISIBLE_DEVICES": ""},
        timeout=1200,
    )


@pytest.mark.tour
def test_commands(copy):
    failed = None
    for block in blocks():
        if block.mark == "file":
            (copy / block.name).write_text(block.text)
        elif block.mark == "run":
            done = shell(block.text, copy)
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            assert "Warning: " not in done.stdout + done.stderr, f"{block.text}\nwarns in the words of a library"
        elif block.mark == "fails":
            failed = shell(block.text, copy)
            assert failed.returncode == 2, failed.stderr
        elif block.mark == "prints":
            assert failed.stderr.strip() == block.text.strip()
    _one_run(copy / "runs" / "my")
    assert (copy / "my-model" / "config.json").is_file() and (copy / "20b.yml").is_file()


def _one_run(folder: Path) -> None:
    """The tour's six starts, on five layouts, are one run that was resumed five times, and it learns."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == list(range(40)) and losses[39] < losses[0] - 1.0
    events = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    starts = [(each["event"], each["step"]) for each in events if each["event"] in ("start", "resume")]
    assert starts == [("start", 0), *(("resume", step) for step in (10, 15, 20, 25, 30))]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_every_command_is_run_or_accounted_for():
    for block in blocks():
        if block.kind == "sh" and block.mark is None:
            for line in block.text.splitlines():
                assert line.startswith(NOT_RUN), f"{line!r} has no mark that has it tested"


def test_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target.partition("#")[0]).is_file(), target
    named = re.findall(r"`((?:tools|requirements|configs|docs)/[\w./-]*|Dockerfile[\w.]*)", text)
    assert len(named) > 5
    for target in named:
        assert (ROOT / target).exists(), target


def test_the_page_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200

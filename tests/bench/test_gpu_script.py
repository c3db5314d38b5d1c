"""The one command for a lent GPU, on a CPU: rows of the speed table, and the page that they are written into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = "before\n<!-- gpu.sh -->\nold\n<!-- end -->\nbetween\n<!-- measured: x -->\nkept\n<!-- end -->\n"
ROW = {
    "what": "SHAPE, bf16, 2 x 32 tokens (MFU 40.5% of 989 TFLOP/s)",
    "unit": "tokens/s",
    "peer": "PEER",
    "ours": 200.0,
    "theirs": 100.0,
    "ratio": 2.0,
    "least": 1.5,
    "most": 2.5,
    "memory": 0.5,
}
# A `python3` that has all packages but FlashAttention 3, and measures nothing. It notes what it is asked for.
MEASURES = f"""
case "$*" in *flash_attn_interface*) exit 1 ;; -c*) exit 0 ;; *gpu-rows*) exec {sys.executable} "$@" ;; esac
echo "$*" >>"$ASKED"
while [[ $1 != --contenders ]]; do shift; done
row=${{ROW/SHAPE/$7}}
echo "a warning" && echo "[${{row//PEER/${{3/ours-/ours, }}}}]"
"""


def gpu_script(folder: Path, page: Path, python: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Args:
    python: a script in the place of `python3`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"DEVICE": "cpu", "SHAPES": "tiny llama-tiny", "CHOICES": "", "CHOICE_SHAPE": "tiny"}
    environment |= {"SEQUENCE": "32", "ROUNDS": "1", "PAGE": str(page), "OMP_NUM_THREADS": "1"}
    environment |= {"ROW": json.dumps(ROW), "ASKED": str(folder / "asked"), **more}
    if python is not None:
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python3").write_text(f"#!/bin/bash\n{python}\n")
        (folder / "bin" / "python3").chmod(0o755)
        environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    command = [ROOT / "bench" / "gpu.sh", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder.parent)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def line(shape: str, peer: str) -> str:
    what = f"{shape}, bf16, 2 x 32 tokens (MFU 40.5% of 989 TFLOP/s)"
    return f"| {what} | 200 tokens/s | {peer} | 100 tokens/s | 2.00 (1.50 – 2.50) | 0.50 |"


def test_rows_are_written_into_the_page(tmp_path: Path, page: Path):
    done = gpu_script(tmp_path / "found", page, MEASURES)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "found" / "speed.md").read_text()
    assert rows == done.stdout
    assert rows.splitlines()[2:] == [line("llama-tiny", "compiled"), line("tiny", "compiled")]
    assert page.read_text() == PAGE.replace("old\n", f"{rows}\ncpu.\n")


def test_a_second_call_goes_on(tmp_path: Path, page: Path):
    asked = tmp_path / "found" / "asked"
    for shapes, calls in (("tiny", 1), ("tiny", 1), ("tiny llama-tiny", 2)):
        assert gpu_script(tmp_path / "found", page, MEASURES, SHAPES=shapes).returncode == 0
        assert len(asked.read_text().splitlines()) == calls
    assert line("tiny", "compiled") in page.read_text()


def test_choices_are_measured_beside_ours(tmp_path: Path, page: Path):
    done = gpu_script(tmp_path / "found", page, MEASURES, CHOICES="fp8 graphs varlen fa3")
    assert done.returncode == 0, done.stderr
    assert "tiny-fa3: not measured, FlashAttention 3 (flash_attn_interface) is not installed" in done.stdout
    shape, *choices, other = (tmp_path / "found" / "asked").read_text().splitlines()
    assert "--contenders ours compiled" in shape and "--shapes llama-tiny" in other
    for choice, words in zip(("fp8", "graphs", "varlen"), choices, strict=True):
        assert f"--contenders ours ours-{choice} --device cpu --shapes tiny" in words
        assert ("data.reset_attention_at_eod=true" in words) == (choice == "varlen")
        assert line("tiny", f"ours, {choice}") in page.read_text()


def test_several_micro_batches_and_packages_of_kernels(tmp_path: Path, page: Path):
    done = gpu_script(tmp_path / "found", page, MEASURES, SHAPES="pythia-1.4b mamba2-370m")
    assert done.returncode == 0, done.stderr
    asked = [line.split() for line in (tmp_path / "found" / "asked").read_text().splitlines()]
    shapes = [words[words.index("--shapes") + 1] for words in asked]
    assert shapes == ["pythia-1.4b", "pythia-1.4b", "mamba2-370m", "mamba2-370m"]
    assert "training.accumulation=4" in asked[1]
    assert "model.kernels=fla" in asked[3] and asked[3][asked[3].index("--contenders") + 1 :][:2] == [
        "ours",
        "ours-torch",
    ]


TESTS = """
def test_first(): pass
def test_first_and_more(): pass
def test_last():
    import pathlib
    assert pathlib.Path("fixed").exists()
"""


def test_parity_continues(tmp_path: Path, page: Path):
    """Calls with one folder run each test until it has passed, and then none."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    run = f"cd {tmp_path} && exec {sys.executable} -m pytest -v -p no:cacheprovider --rootdir . test_some.py"
    python = f"case $* in *get_device_name*) echo a GPU ;; *pytest\\ -v*) {run} ;; esac"
    results = []
    for call in range(3):
        if call:
            (tmp_path / "fixed").touch()
        done = gpu_script(tmp_path / "found", page, python, DEVICE="cuda", ONLY="parity")
        results.append((done.returncode, done.stdout.split(";")[0].splitlines()[-1] if done.stdout else ""))
    assert results[:2] == [(1, "parity: 2 passed in all calls"), (0, "parity: 3 passed in all calls")]
    assert results[2] == (0, "")  # pytest is not called
    log = (tmp_path / "found" / "parity.log").read_text()
    assert "1 passed, 2 deselected" in log


def test_what_cannot_be_measured_is_said_and_leaves_the_page(tmp_path: Path, page: Path):
    done = gpu_script(tmp_path / "found", page, "[[ $1 == -c || $3 == gpu-rows ]] || exit 3")
    assert done.returncode == 1 and page.read_text() == PAGE
    assert all(f"{shape}: see " in done.stderr for shape in ("tiny", "llama-tiny"))


def test_time_that_is_spent(tmp_path: Path, page: Path):
    done = gpu_script(tmp_path / "found", page, MEASURES, BUDGET="0")
    assert done.returncode == 1 and page.read_text() == PAGE
    assert "tiny: no time is left" in done.stderr and not (tmp_path / "found" / "asked").exists()


def test_a_row_that_takes_too_long(tmp_path: Path, page: Path):
    slow = MEASURES.replace("echo", "case $* in *llama*) ;; *) sleep 60 ;; esac; echo", 1)
    done = gpu_script(tmp_path / "found", page, slow, BUDGET="22")
    assert done.returncode == 1 and "\ntiny: not done in time" in f"\n{done.stderr}"


def test_packages_that_are_missing(tmp_path: Path, page: Path):
    done = gpu_script(tmp_path / "found", page, "echo No module named xdist >&2; exit 1")
    assert done.returncode == 2 and "xdist" in done.stderr and page.read_text() == PAGE


@pytest.mark.slow  # compiles transformers' loops
def test_for_real(tmp_path: Path, page: Path):
    done = gpu_script(tmp_path / "found", page)
    assert done.returncode == 0, done.stderr
    assert "| llama-tiny, fp32, 2 x 32 tokens" in page.read_text() and "old" not in page.read_text()

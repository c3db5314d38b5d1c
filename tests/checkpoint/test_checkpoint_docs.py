"""The Python examples of the documentation run, and only the page is needed to read the files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.fragment import FragmentSpec
from megatron.checkpoint.hf.config import names
from megatron.checkpoint.reshape import parse_layout, reshape
from tests.checkpoint.hf.test_hf_tools import MODELS, checkpoint_of
from tests.selection import covering
from tools.support_table import summary

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
AXES = ("tensor", "pipeline", "ZeRO", "context", "folded", "expert")  # the first columns of the table of layouts


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = [each for each in examples() if "from megatron" in each]
    exec(compile(example, str(DOCUMENT), "exec"), {})
    assert (tmp_path / "checkpoints" / "step_00000010" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "layout"),
    covering(
        ["qwen3", "mixtral", "zamba2", "olmo_hybrid"], ["tensor=1", "tensor=2,pipeline=2", "tensor=2,data=3,zero=3"]
    ),
)
def test_the_page_is_enough_to_read_a_checkpoint(name: str, layout: str, tmp_path) -> None:
    """In a process that has numpy, the page and nothing of ours. Weights are bf16, and masters fp32."""
    source, _ = checkpoint_of(tmp_path, MODELS[name], bf16=True)
    reshape(source, tmp_path / "cut", parse_layout(layout))
    cut = open_checkpoint(tmp_path / "cut")
    (example,) = [each for each in examples() if "def read(" in each]
    wanted = [[name, state] for name, state in cut.stored]
    script = f"""{example}
import sys
for number, (name, state) in enumerate({wanted!r}):
    np.save(f"{{sys.argv[2]}}/{{number}}.npy", read(Path(sys.argv[1]), name, state))
assert not {{"torch", "megatron", "safetensors"}} & set(sys.modules)
"""
    (tmp_path / "found").mkdir()
    words = [sys.executable, "-I", "-c", script, str(tmp_path / "cut"), str(tmp_path / "found")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for number, (name, state) in enumerate(wanted):
        tensor = cut.tensors[name]
        ours = cut.read(FragmentSpec.whole(tensor, state), cut.stored[name, state]).data.view(tensor.shape).float()
        assert np.array_equal(np.load(tmp_path / "found" / f"{number}.npy"), ours.numpy()), name


def test_the_table_of_architectures_is_that_of_the_code_and_of_the_layouts() -> None:
    """Each architecture has one row, and the axes next to a name of the matrix are the axes that it is trained on
    there."""
    trained = {}
    for line in summary().splitlines()[2:]:
        name, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        trained[name] = {axis for axis, cell in zip(AXES, cells) if cell != "–"}
    table = DOCUMENT.read_text().partition("| architecture | import, export | trained as, on | notes |\n")[2]
    found = []
    for line in table.partition("\n\n")[0].splitlines()[1:]:
        theirs, how, place, _ = (cell.strip() for cell in line.strip("|").split("|"))
        assert how == "both"
        found += re.findall("`([^`]+)`", theirs)
        for group in place.split("<br>"):
            rows, axes = group.split(": ")
            for row in re.findall("`([^`]+)`", rows):
                assert set(axes.split(", ")) == trained[row], (theirs, row)
    assert sorted(found) == sorted(names())

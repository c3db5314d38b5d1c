"""`tools/config.py coordinate-check` names what grows, and finds muP flat over widths and CompleteP over depths."""

from __future__ import annotations

import json

import pytest

from megatron.api.coordinates import CoordinateCheck, member, slopes
from tools.config import main

BASE = """
model:
  layers: (attention/mlp) x2
  hidden_size: 32
  vocab_size: 64
  norm: {type: rmsnorm}
  attention: {heads: 4}
  mlp: {hidden_size: 128}
  init: {std: 0.1, output: normal, head: zeros}
training: {steps: 100, sequence_length: 16, micro_batch_size: 8, global_batch_size: 8}
optimizer: {lr: 0.003}
data: {synthetic: copy}
"""
MUP = ["model.parametrization.type=mup", "model.parametrization.base_width=32"]
COMPLETEP = [
    "model.parametrization.type=completep",
    "model.parametrization.base_width=32",
    "model.parametrization.base_depth=2",
]


@pytest.fixture
def file(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yml").write_text(BASE)
    return "a.yml"


def verdicts(capsys, *arguments: str) -> dict[str, str]:
    assert main(["coordinate-check", "--json", "--steps", "3", "--seeds", "2", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["points"]) == 5 * 4 * 3  # places, steps and sizes
    return {each["place"]: each["verdict"] for each in found["slopes"]}


def test_over_widths(file, tmp_path, capsys):
    widths = ("--widths", "32,64,128", "a.yml")
    standard = verdicts(capsys, *widths)
    assert {place for place, verdict in standard.items() if verdict == "grows"} >= {"attention", "mlp", "stream"}
    assert set(verdicts(capsys, *widths, *MUP, "-o", "a.png").values()) == {"flat"}
    normal = "model.init.head=normal"  # logits shrink with the root of the width, and are right
    assert set(verdicts(capsys, *widths, *MUP, normal).values()) == {"flat"}
    assert verdicts(capsys, *widths, normal)["logits"] == "grows"
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_over_depths(file, capsys):
    depths = ("--depths", "2,4,8", "a.yml", "model.init.head=normal", "optimizer.lr=0.01")
    assert verdicts(capsys, *depths)["stream"] == "grows"
    assert set(verdicts(capsys, *depths, *COMPLETEP).values()) == {"flat"}


def test_what_was_given_grows_with_the_width(file):
    wide = member([file], [], "width", 64).model
    assert (wide.attention.heads, wide.attention.head_dim, wide.mlp.hidden_size) == (8, 8, 256)
    larger = member([file], [*MUP, "model.parametrization.base_head_dim=8"], "width", 64).model
    assert (larger.attention.heads, larger.attention.head_dim, larger.mlp.hidden_size) == (4, 16, 256)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["a.yml"], "sizes must be given along one axis"),
        (["a.yml", "--widths", "32,64", "--depths", "2,4"], "sizes must be given along one axis"),
        (["a.yml", "--widths", "32,36"], "model.attention.heads must grow with the width, and 4 times 1.125"),
        (["a.yml", "--depths", "3,4", "model.layers=(attention mlp) x2"], "a depth must be a multiple of the 2 blocks"),
    ],
)
def test_wrong_sizes_are_refused(file, capsys, arguments, says):
    assert main(["coordinate-check", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_slopes_are_those_of_powers():
    points = [CoordinateCheck(size, "x", 1, 1.0, 3.0 * size**0.5) for size in (8, 16, 64)]
    assert slopes(points)[0].slope == pytest.approx(0.5) and slopes(points)[0].verdict == "grows"
    stopped = [CoordinateCheck(size, "x", 1, 1.0, float("inf")) for size in (8, 16)]
    assert slopes(stopped)[0].verdict == "diverges"

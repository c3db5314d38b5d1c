"""Histories of parameters that torchft's regression tests expect, given by our hooks and rounds.

Two replicas of two weights. Inner steps of -2, an outer SGD of rate 2 without momentum, six steps between two exchanges
of a weight.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.features.peers.companies import secret
from tests.features.peers.small import SmallPeer, together

GOLDEN = json.loads(Path(__file__).with_name("torchft_diloco.json").read_text())
FIRST, SECOND = "layers.0.weight", "layers.1.weight"


def inner(weights, step):
    for each in weights.values():
        each.sub_(2.0)


def replica(folder: Path, name: str, steps: int, names=(FIRST, SECOND), **keys) -> SmallPeer:
    own = {
        "every": 6, "name": name, "members": ["a", "b"], "folder": str(folder), "signature": "shared_key",
        "outer_lr": 2.0, "outer_momentum": 0.0, "timeout": 60.0, **keys,
    }  # fmt: skip
    return SmallPeer(own, {each: torch.ones(1, dtype=torch.float64) for each in names}, steps, inner)


def rows(history) -> list[list[float]]:
    return [[float(each) for each in row.values()] for row in history]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"delay {case['delay']} alpha {case['alpha']}")
def test_streaming_diloco(tmp_path, case):
    key, steps = secret(tmp_path), len(case["local"]) - 1
    keys = {"algorithm": "streaming_diloco", "fragments": 2, "delay": case["delay"], "alpha": case["alpha"]}
    peers = [replica(tmp_path, name, steps, key_file=key, **keys) for name in "ab"]
    common: dict[str, list[float]] = {}

    def border(peer: SmallPeer) -> None:
        if str(peer.completed) in case["global"]:
            common[str(peer.completed)] = rows([peer.part.states["outer_weights"]])[0]

    together([lambda: peers[0].run(border), peers[1].run])
    assert common == case["global"]
    for peer in peers:
        assert rows(peer.history) == case["local"]


def test_diloco(tmp_path):
    """A weight that is exchanged after steps 6 and 12, as torchft's second fragment."""
    case, key = GOLDEN["cases"][0], secret(tmp_path)
    peers = [replica(tmp_path, name, 12, (SECOND,), algorithm="diloco", key_file=key) for name in "ab"]
    together([each.run for each in peers])
    for peer in peers:
        assert [row[0] for row in rows(peer.history)] == [row[1] for row in case["local"][:13]]


def test_a_survivor(tmp_path):
    """Of two replicas one fails. torchft's other one continues to the same weights, and so does ours."""
    case, key = GOLDEN["survivor"], secret(tmp_path)
    steps = len(case["local"]) - 1
    keys = {"algorithm": "streaming_diloco", "fragments": 2, "key_file": key, "timeout": 0.2}
    a, b = replica(tmp_path, "a", steps, **keys), replica(tmp_path, "b", steps, **keys)

    def fails(peer: SmallPeer) -> None:
        if peer.completed == 7:
            peer.stop("failed")

    together([a.run, lambda: b.run(fails)])
    assert rows(a.history) == case["local"]
    assert [json.loads(each.read_text())["signed"]["absent"] for each in sorted((tmp_path / "rounds").iterdir())][2:4]

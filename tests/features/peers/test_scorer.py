"""A scorer of contributions: whom it refuses has strikes, and all peers follow the line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from megatron.config.problems import UserError
from tests.features.peers.companies import secret
from tests.features.peers.small import SmallPeer, together
from tests.paths import ROOT

PAGE: dict[str, Any] = {}
exec(re.findall(r"```python\n(.*?)```", (ROOT / "docs/peers.md").read_text(encoding="utf-8"), re.DOTALL)[0], PAGE)


def score(round, common, deltas):
    """The one of the documentation, with a control character in its reasons."""
    common["w"].zero_()  # of a copy
    return {peer: reason.replace(" ", "\n", 1) for peer, reason in PAGE["score"](round, common, deltas).items()}


def broken(round, common, deltas):
    raise KeyError("w")


def company(tmp_path, scorer: str, algorithm: str, **keys) -> dict[str, SmallPeer]:
    def inner(sign: float):
        def step(weights, number) -> None:
            weights["w"].add_(sign * torch.linspace(0.1, 1.0, 4096, dtype=torch.float64))

        return step

    key = secret(tmp_path)
    keys = {
        "every": 2, "members": ["a", "b", "c"], "folder": str(tmp_path), "signature": "shared_key", "key_file": key,
        "outer_lr": 1.0, "outer_momentum": 0.0, "timeout": 20.0, "strikes": 2, "algorithm": algorithm,
        "scorer": f"{__name__}:{scorer}", **keys,
    }  # fmt: skip
    weights = {"w": torch.zeros(4096, dtype=torch.float64)}
    return {
        # c is faster: others must not decide a round before c has announced that it trains for it
        name: SmallPeer({**keys, "name": name}, weights, 8, inner(-1.0 if name == "c" else 1.0), 0.1 * (name != "c"))
        for name in keys["members"]
    }


@pytest.mark.parametrize("algorithm", ["diloco", "sparseloco"])
def test_a_peer_against_the_others_is_excluded(tmp_path, algorithm):
    peers = company(tmp_path, "score", algorithm, **({"top": 4096} if algorithm == "sparseloco" else {}))
    together([each.run for each in peers.values()])
    found = [json.loads(each.read_text())["signed"] for each in sorted((tmp_path / "rounds").iterdir())]
    assert [[each["peer"] for each in line["members"]] for line in found] == [["a", "b"]] * 4
    assert [line["absent"].get("c") for line in found] == ["'against\\nthe others'"] * 2 + [None] * 2
    assert found[-1]["strikes"] == {"c": 2}
    common = [each.part.states["outer_weights"]["w"] for each in peers.values()]
    assert all(torch.equal(each, common[0]) for each in common) and float(common[0].min()) >= 0


def test_a_scorer_that_fails_ends_the_run_with_its_name(tmp_path):
    peers = company(tmp_path, "broken", "diloco")
    with pytest.raises(UserError, match="peers.scorer = .*:broken fails with KeyError: 'w'"):
        together([each.run for each in peers.values()])


def test_a_peer_that_sends_zeros_does_not_hide_another():
    good = torch.linspace(0.1, 1.0, 8)
    deltas = {"a": good, "b": 2 * good, "c": -good, "d": torch.zeros(8)}
    found = PAGE["score"](0, {"w": good}, {peer: {"w": each} for peer, each in deltas.items()})
    assert found == {"c": "against the others"}

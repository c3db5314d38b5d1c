"""Which states of an optimizer the engine makes, saves and resumes, and which it refuses to guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.engine import replicas
from megatron.engine.state import EngineState
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role


def parameter(*shape: int) -> nn.Parameter:
    made = nn.Parameter(torch.ones(shape))
    made.logical, made.cut = LogicalTensor("w", shape, Role.HIDDEN), (0, 1)
    return made


def engine_state(optimizer: torch.optim.Optimizer) -> EngineState:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return EngineState(None, optimizer, parameters, Mesh.single(), stage=0)


class Averaged(torch.optim.Optimizer):
    """An optimizer from outside with one state per element, which it declares."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("mean",)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 0.5), alpha=group["lr"])


class Factored(Averaged):
    """It keeps one number per row next to what it declares."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.grad.square().mean(dim=1)


def test_the_states_of_an_optimizer_that_declares_none_are_not_guessed():
    with pytest.raises(TypeError, match="RMSprop.*state_names"):
        list(engine_state(torch.optim.RMSprop([parameter(2, 3)])).fragments())


def test_declared_states_are_saved_and_resumed():
    weights = parameter(2, 3)
    optimizer = Averaged([weights])
    state = engine_state(optimizer)
    assert [fragment.state for fragment in state.fragments()] == ["master", "mean"]
    for target in state.targets():
        if target.state == "mean":
            target.data.fill_(2.0)
    weights.grad = torch.zeros(2, 3)
    optimizer.step()
    torch.testing.assert_close(weights.detach(), torch.full((2, 3), 1.0 - 0.1 * 1.0))


def test_a_state_that_was_not_declared_is_not_lost_in_silence():
    weights = parameter(2, 3)
    optimizer = Factored([weights])
    weights.grad = torch.ones(2, 3)
    optimizer.step()
    with pytest.raises(TypeError, match=r"Factored keeps 'rows'.*\(2,\).*mean"):
        list(engine_state(optimizer).fragments())


def test_pieces_to_hash_are_looked_for_again_where_a_tensor_is_another_one(monkeypatch):
    """Else the hash would be of memory that is no longer used, in which no bit flips."""
    weights = parameter(2, 3)
    optimizer = Averaged([weights])
    state, looks, find = engine_state(optimizer), [], replicas.named_pieces
    monkeypatch.setattr(replicas, "named_pieces", lambda state: looks.append(state) or find(state))
    pieces = replicas.PieceHashes(state)

    def hashes() -> dict[str, int]:
        found, names = pieces.take(torch.device("cpu"))
        expected = {name: int(replicas.hash_bits(values)) for name, _, values in find(state)}
        assert dict(zip(names, found[:, 1].tolist(), strict=True)) == expected
        return expected

    first = hashes()
    assert first.keys() == {"w (master)", "w (mean)"} and hashes() == first and len(looks) == 1
    optimizer.state[weights]["mean"][1, 2] = 0.5
    weights.data[0, 0] += 1.0
    second = hashes()
    assert all(second[name] != first[name] for name in first) and len(looks) == 1, "the values are those of now"
    optimizer.state[weights]["mean"] = torch.full((2, 3), 3.0)
    assert hashes() != second and len(looks) == 2
    weights.data = torch.full((2, 3), 4.0)
    hashes()
    assert len(looks) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8])
def test_small_pieces_are_hashed_together_as_one_by_one(dtype):
    """Empty ones too, and sums that pass the ends of 64 bits."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(0,), (7, 3), (), (0, 5), (4095,), (1,)]
    pieces = [(100 * torch.randn(shape, generator=draw)).to(dtype) for shape in shapes]
    small = replicas._SmallPieces(pieces)
    assert small.hashes().tolist() == [int(replicas.hash_bits(each)) for each in pieces]
    pieces[1][2, 1] += 1
    assert small.hashes().tolist() == [int(replicas.hash_bits(each)) for each in pieces], "the values are those of now"

"""An objective that reads logits: against torch in float64, on layouts, and in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from my_lab.smoothing.objective import Smoothing
from torch import Tensor

from megatron.config import ConfigError, resolve
from megatron.objectives.contract import Objective
from megatron.objectives.named import objective_of
from megatron.parallel.layers.cross_entropy import LossOptions, linear_cross_entropy
from megatron.parallel.layers.objective_logits import ChunkLogits, LogitsLoss
from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.testing import check_layouts, train_on_ranks
from megatron.testing.ranks import on_ranks

N, H, V = 11, 6, 18
VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())
OWN = {"type": "smoothing", "options": {"share": 0.2, "entropy": 0.3}}


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((N, H), (V, H), (V,))
    )
    weights = torch.rand(N, generator=generator, dtype=torch.float64) * (torch.arange(N) != 4)
    return x, weight, bias, torch.arange(N) * 7 % V, weights


def on_whole_logits(share: float, entropy: float, softcap: float | None, z_loss: float) -> list[Tensor]:
    """The loss and its gradients by torch's own functions."""
    x, weight, bias, labels, weights = drawn()
    logits = F.linear(x, weight) * 0.8 + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    costs = F.cross_entropy(logits, labels, reduction="none", label_smoothing=share)
    costs = costs - entropy * torch.distributions.Categorical(logits=logits).entropy()
    loss = (weights * (costs + z_loss * logits.logsumexp(1).square())).sum()
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight, bias))]


def on_shared_logits(
    objective: Objective, softcap: float | None, z_loss: float, chunk: int, axis: Axis
) -> list[Tensor]:
    """The same by the head's loss on this rank's rows of the vocabulary."""
    x, weight, bias, labels, weights = drawn()
    rows = slice(axis.rank * V // axis.size, (axis.rank + 1) * V // axis.size)
    own, part = weight.detach()[rows].requires_grad_(), bias.detach()[rows].requires_grad_()
    options = LossOptions(multiplier=0.8, softcap=softcap, z_loss=z_loss, chunk=chunk)
    of_logits = LogitsLoss(objective.cost_of_logits, V, rows.start)
    loss, _ = linear_cross_entropy(
        x, own, part, labels, weights, of_logits, first=rows.start, axis=axis, options=options
    )
    return [loss.detach(), *torch.autograd.grad(loss, (x, own, part))]


def on_this_rank(ranks: int, *case: Any) -> list[Tensor]:
    group = torch.distributed.group.WORLD
    return on_shared_logits(*case, ALONE if ranks == 1 else Axis(group.rank(), ranks, group, tuple(range(ranks))))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "share, entropy, softcap, z_loss, chunk",
    [(0.1, 0.0, None, 0.0, 4), (0.3, 0.7, 2.0, 0.05, 0), (0.0, 1.5, None, 0.0, 5)],
)
def test_loss_and_gradients_are_those_of_torch(ranks, share, entropy, softcap, z_loss, chunk):
    """The gradient of x is a sum over ranks, that of a row is on its rank. The entropy composes sums over ranks."""
    found = on_ranks(ranks, on_this_rank, ranks, Smoothing(share, entropy), softcap, z_loss, chunk)
    loss, x, weight, bias = on_whole_logits(share, entropy, softcap, z_loss)
    close = {"rtol": 1e-10, "atol": 1e-12}
    for each in found:
        torch.testing.assert_close(each[0], loss, **close)
    torch.testing.assert_close(sum(each[1] for each in found), x, **close)
    torch.testing.assert_close(torch.cat([each[2] for each in found]), weight, **close)
    torch.testing.assert_close(torch.cat([each[3] for each in found]), bias, **close)


def test_gradient_in_closed_form():
    """Of smoothed labels: p - (1 - share) onehot - share / V."""
    logits = drawn()[0].detach().requires_grad_()
    labels = torch.arange(N) % H
    Smoothing(0.3, 0.0).cost_of_logits(ChunkLogits(logits, labels, H)).sum().backward()
    wanted = logits.detach().softmax(1) - 0.7 * F.one_hot(labels, H).double() - 0.3 / H
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-12, atol=1e-12)


class OwnIdsOnly(Objective):
    """Forgets the other ranks."""

    def cost_of_logits(self, logits: ChunkLogits) -> Tensor:
        return logits.own_CV.logsumexp(1)


def test_a_cost_that_differs_between_ranks_is_refused():
    with pytest.raises(Exception, match="must be the same on all tensor parallel ranks"):
        on_ranks(2, on_this_rank, 2, OwnIdsOnly(), None, 0.0, 4)


def test_layouts():
    values = {**VALUES, "objective": OWN, "training": {**VALUES["training"], "z_loss": 0.01, "loss_chunk": 5}}
    layouts = [{"parallel": {each: 2}} for each in ("tensor", "pipeline", "context")]
    check_layouts(values, [*layouts, {"zero": {"stage": 1}}])


def test_in_a_run(tmp_path):
    """Two ranks log what one logs. With neither option the steps equal steps of the cross-entropy, to rounding."""

    def losses(name: str, ranks: int, *overrides: str, **sections: Any) -> list[list[float]]:
        values = {**VALUES, "run": {"dir": str(tmp_path / name)}, "logging": {"console": "quiet", "curve": False}}
        values |= {"training": {**VALUES["training"], "steps": 3}, **sections}
        records = train_on_ranks(ranks, values, overrides)
        return [[each["loss"], each["grad_norm"]] for each in records if "loss" in each]

    one = losses("one", 1, objective=OWN)
    assert losses("two", 2, "parallel.tensor=2", objective=OWN) == [pytest.approx(each, rel=1e-5) for each in one]
    neither = losses("neither", 1, objective={"type": "smoothing", "options": {"share": 0}})
    assert neither == [pytest.approx(each, rel=1e-5) for each in losses("plain", 1)] and neither[0][1] != one[0][1]


def test_options_are_checked_before_the_start():
    def refused(options: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as found:
            resolve({**VALUES, "objective": {"type": "smoothing", "options": options}})
        return str(found.value)

    assert "share must be a number from 0 to below 1" in refused({"share": 1})
    assert "the options of smoothing must be among share, entropy, and gamma is not" in refused({"gamma": 1})
    assert "objective.k must come with objective.type: goldfish" in str(_refused_key())
    assert objective_of(resolve({**VALUES, "objective": {"type": "smoothing"}})).share == 0.1


def _refused_key() -> ConfigError:
    with pytest.raises(ConfigError) as found:
        resolve({**VALUES, "objective": {"type": "smoothing", "k": 3}})
    return found.value

"""Outer steps of DiLoCo against closed models and torch's SGD, in float64."""

from __future__ import annotations

import pytest
import torch

from megatron.features.peers.outer import fragments_of, mixed, outer_step, tree_mean

# torchft's regression fixtures: local weights of two layers after each inner step, for (delay, alpha).
FIRST_LAYER = {
    (0, 0.0): {0: 1.0, 1: -1.0, 2: -3.0, 3: -11.0, 8: -21.0, 9: -35.0},
    (0, 0.5): {3: -8.0, 9: -24.5},
    (1, 0.0): {3: -7.0},
}


def simulate(delay: int, alpha: float, syncs: int = 6) -> tuple[list[list[float]], list[list[float]]]:
    """Two equal peers, fragments of one weight each, inner steps of -2, an outer SGD of rate 2, a fragment each three
    steps. Weights after each step, and the global copies after each outer step."""
    local = [torch.ones(1, dtype=torch.float64) for _ in range(2)]
    theta = [each.clone() for each in local]
    history, outer = [[float(each) for each in local]], []
    for sync in range(syncs):
        number = sync % 2
        for step in range(1, 4):
            local = [each - 2.0 for each in local]
            if step == 3 - delay:
                delta = theta[number] - local[number]
            if step == 3:
                outer_step(theta[number], None, tree_mean([delta, delta]), 2.0, 0.0)
                local[number] = mixed(local[number], theta[number], alpha)
            history.append([float(each) for each in local])
        outer.append([float(each) for each in theta])
    return history, outer


def plain_model(delay: int, alpha: float, syncs: int = 6) -> list[list[float]]:
    """The same from the fixtures' description, in Python numbers."""
    p, g, history = [1.0, 1.0], [1.0, 1.0], [[1.0, 1.0]]
    for sync in range(syncs):
        f, pg = sync % 2, 0.0
        for ls in (1, 2, 3):
            p = [x - 2 for x in p]
            pg = g[f] - p[f] if ls == 3 - delay else pg
            if ls == 3:
                g[f] -= 2 * pg
                p[f] = g[f] + alpha * (p[f] - g[f])
            history.append(list(p))
    return history


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 1])
def test_streaming_fixtures(delay, alpha):
    history, outer = simulate(delay, alpha)
    assert history == plain_model(delay, alpha)
    for step, value in FIRST_LAYER.get((delay, alpha), {}).items():
        assert history[step][0] == value
    if alpha == 1.0:  # local weights never see the global copy, which moves all the same
        assert [row[0] for row in history[:7]] == [1.0 - 2 * step for step in range(7)]
        assert outer[0][0] == {0: -11.0, 1: -7.0}[delay]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_outer_step_is_sgd_of_torch(momentum):
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(5, generator=draw, dtype=torch.float64)
    weight = torch.nn.Parameter(theta.clone())
    oracle = torch.optim.SGD([weight], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    velocity = torch.zeros_like(theta) if momentum else None
    for _ in range(5):
        gradient = torch.randn(5, generator=draw, dtype=torch.float64)
        weight.grad = gradient.clone()
        oracle.step()
        outer_step(theta, velocity, gradient, 0.7, momentum)
    torch.testing.assert_close(theta, weight.detach(), rtol=1e-14, atol=1e-14)


def test_sums_of_aligned_parts_are_those_of_the_whole():
    values = [torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    whole = tree_mean(values) * 8
    halves = [tree_mean(values[:4]) * 4, tree_mean(values[4:]) * 4]
    assert torch.equal(whole, halves[0] + halves[1])
    assert torch.equal(tree_mean(values[:3]), (values[0] + values[1] + values[2]) / 3)


def test_fragments_stride_over_layers():
    names = ["embedding.weight", "head.weight", "final_norm.weight", *(f"layers.{i}.mlp.weight" for i in range(5))]
    first, second = fragments_of(names, 2)
    assert first == ["embedding.weight", "layers.0.mlp.weight", "layers.2.mlp.weight", "layers.4.mlp.weight"]
    assert second == ["final_norm.weight", "head.weight", "layers.1.mlp.weight", "layers.3.mlp.weight"]

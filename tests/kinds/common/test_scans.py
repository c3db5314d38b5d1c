"""The chunked scans against token-by-token recurrences in float64: outputs, last states, every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.kinds.common.recurrence.pieces import document_starts
from megatron.kinds.mamba.selective_scan import selective_scan
from megatron.kinds.mamba.ssd import ssd
from tests.float64 import DOUBLE, EXACT
from tests.margins import Measured
from tests.model.recurrences import mamba2_head, mamba_channel, softplus

Bs, S = 2, 19
# Ten times what rounding a logarithm does to a decay: they reach 200, and fp32 rounds to 2^-24 of it.
ROUNDED = 10 * 200 * 2.0**-24
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 8 + [2] * 7, [3] * 19])
CONTINUED = {"none": None, "all": torch.tensor([0, 3]), "one": torch.tensor([7, 3])}


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts_of(kind: str | None):
    return None if kind is None else document_starts(DOCUMENTS, CONTINUED[kind])


def places(starts, sample: int) -> list[int]:
    return [-1] * S if starts is None else starts[sample].tolist()


def stacked(each: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [S, ...], last state) of each head of samples: outputs [B, S, heads, ...] and states [B, heads, ...]."""
    y = torch.stack([torch.stack([y for y, _ in row], 1) for row in each])
    return y, torch.stack([torch.stack([last for _, last in row]) for row in each])


def values_and_gradients(function: Callable, inputs: list[torch.Tensor], dtype: torch.dtype):
    """Results of the function, and the gradients of a random combination of it, in float64."""
    leaves = [each.detach().to(dtype).requires_grad_() for each in inputs]
    outputs = function(*leaves)
    sum((each * draw(*each.shape, seed=90 + i).to(dtype)).sum() for i, each in enumerate(outputs)).backward()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]
    return [each.detach().to(DOUBLE) for each in outputs], [each.to(DOUBLE) for each in gradients]


def check(scan: Callable, recurrence: Callable, inputs: list[torch.Tensor], names: list[str]) -> None:
    """In float64 the scan is the recurrence, token by token. In fp32 it keeps the digits that fp32 has.

    Args:
        names: of the inputs whose gradients are compared.
    """
    wanted = values_and_gradients(recurrence, inputs, DOUBLE)
    for dtype, bound in ((DOUBLE, EXACT), (torch.float32, ROUNDED)):
        for found, expected in zip(values_and_gradients(scan, inputs, dtype), wanted):
            for name, one, other in zip(names, found, expected):
                # where everything is forgotten at once, gradients of decays are differences of nothing
                assert Measured((one - other).norm() / other.norm().clamp_min(1.0)) < bound, (dtype, name)


# "fast": a chunk forgets all but its last tokens. "slow": hardly anything. Differences of sums must stay exact.
@pytest.mark.parametrize("decay", [1.0, 6.0, -6.0], ids=["plain", "fast", "slow"])
@pytest.mark.parametrize("documents", [None, "none", "all", "one"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_ssd(chunk: int, documents: str | None, decay: float):
    h, g, P, N = 4, 2, 3, 5
    inputs = [
        draw(Bs, S, h, P, seed=0),
        draw(Bs, S, h, seed=1),
        draw(h, seed=2),
        draw(h, seed=3, scale=0.3) + decay - 1,
        draw(h, seed=4),
        draw(Bs, S, g, N, seed=5),
        draw(Bs, S, g, N, seed=6),
        draw(Bs, h, P, N, seed=7),
    ]
    starts = starts_of(documents)

    def scan(*leaves):
        return ssd(*leaves[:7], chunk=chunk, limits=(0.2, 1.5), initial_BhPN=leaves[7], starts_BS=starts)

    def recurrence(x, dt, bias, A_log, D, B, C, initial):
        steps = softplus(dt + bias).clamp(0.2, 1.5)
        each = [
            [
                mamba2_head(
                    x[b, :, i],
                    steps[b, :, i],
                    -A_log[i].exp(),
                    D[i],
                    B[b, :, i // 2],
                    C[b, :, i // 2],
                    initial[b, i],
                    places(starts, b),
                )
                for i in range(h)
            ]
            for b in range(Bs)
        ]
        return stacked(each)

    check(scan, recurrence, inputs, ["x", "dt", "dt_bias", "A_log", "D", "B", "C", "initial"])


@pytest.mark.parametrize("decay", [1.0, 6.0, -6.0], ids=["plain", "fast", "slow"])
@pytest.mark.parametrize("documents", [None, "none", "all", "one"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_selective_scan(chunk: int, documents: str | None, decay: float):
    d, N = 4, 3
    inputs = [
        draw(Bs, S, d, seed=0),
        draw(Bs, S, d, seed=1),
        draw(Bs, S, d, seed=2),
        draw(d, seed=3),
        draw(d, N, seed=4, scale=0.3) + decay - 1,
        draw(d, seed=5),
        draw(Bs, S, N, seed=6),
        draw(Bs, S, N, seed=7),
        draw(Bs, d, N, seed=8),
    ]
    starts = starts_of(documents)

    def scan(*leaves):
        return selective_scan(*leaves[:8], chunk=chunk, initial_BdN=leaves[8], starts_BS=starts)

    def recurrence(u, z, dt, bias, A_log, D, B, C, initial):
        steps = softplus(dt + bias)
        each = [
            [
                mamba_channel(
                    u[b, :, i], steps[b, :, i], -A_log[i].exp(), D[i], B[b], C[b], initial[b, i], places(starts, b)
                )
                for i in range(d)
            ]
            for b in range(Bs)
        ]
        y, last = stacked(each)
        return y * z / (1 + torch.exp(-z)), last

    check(scan, recurrence, inputs, ["u", "z", "dt", "dt_bias", "A_log", "D", "B", "C", "initial"])


def test_document_starts():
    assert document_starts(DOCUMENTS)[0].tolist() == [0] * 4 + [4] * 8 + [12] * 7
    begun = document_starts(DOCUMENTS, CONTINUED["one"])
    assert begun[0].tolist() == document_starts(DOCUMENTS)[0].tolist() and (begun[1] < -S).all()

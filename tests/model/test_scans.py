"""The chunked scans against token-by-token recurrences in float64: outputs, last states, every gradient."""

from __future__ import annotations

import pytest
import torch

from megatron.kinds.common.documents import document_starts
from megatron.kinds.mamba.selective_scan import selective_scan
from megatron.kinds.mamba2.ssd import ssd
from tests.model.parity import relative
from tests.model.recurrences import mamba2_head, mamba_channel, softplus

Bs, S = 2, 19
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 8 + [2] * 7, [3] * 19])
CONTINUED = {"none": None, "all": torch.tensor([0, 3]), "one": torch.tensor([7, 3])}


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts_of(kind: str | None):
    return None if kind is None else document_starts(DOCUMENTS, CONTINUED[kind])


def places(starts, sample: int) -> list[int]:
    return [-1] * S if starts is None else starts[sample].tolist()


def check(found: list[torch.Tensor], wanted: list[torch.Tensor], inputs, doubles, names) -> None:
    """Equal values, and equal gradients of a random combination of them."""
    for f, w in zip(found, wanted):
        assert relative(f.double(), w) < 2e-6
    sum((f * draw(*f.shape, seed=90 + i)).sum() for i, f in enumerate(found)).backward()
    sum((w * draw(*w.shape, seed=90 + i)).sum() for i, w in enumerate(wanted)).backward()
    for name, mine, theirs in zip(names, inputs, doubles):
        if theirs.grad is None:
            assert mine.grad is None or not mine.grad.any(), name
        else:  # where everything is forgotten at once, gradients of decays are differences of nothing
            assert (mine.grad - theirs.grad).norm() < 1e-5 * theirs.grad.norm().clamp_min(0.01), name


# "fast": a chunk forgets all but its last tokens; "slow": hardly anything; differences of sums must stay exact.
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
    doubles = [each.double().requires_grad_() for each in inputs]
    inputs = [each.requires_grad_() for each in inputs]
    starts = starts_of(documents)
    found = ssd(*inputs[:7], chunk=chunk, limits=(0.2, 1.5), initial_BhPN=inputs[7], starts_BS=starts)
    x, dt, bias, A_log, D, B, C, initial = doubles
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
    wanted = [
        torch.stack([torch.stack([y for y, _ in row], 1) for row in each]),
        torch.stack([torch.stack([last for _, last in row]) for row in each]),
    ]
    check(list(found), wanted, inputs, doubles, ["x", "dt", "dt_bias", "A_log", "D", "B", "C", "initial"])


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
    doubles = [each.double().requires_grad_() for each in inputs]
    inputs = [each.requires_grad_() for each in inputs]
    starts = starts_of(documents)
    found = selective_scan(*inputs[:8], chunk=chunk, initial_BdN=inputs[8], starts_BS=starts)
    u, z, dt, bias, A_log, D, B, C, initial = doubles
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
    y = torch.stack([torch.stack([y for y, _ in row], 1) for row in each])
    wanted = [y * z / (1 + torch.exp(-z)), torch.stack([torch.stack([last for _, last in row]) for row in each])]
    check(list(found), wanted, inputs, doubles, ["u", "z", "dt", "dt_bias", "A_log", "D", "B", "C", "initial"])


def test_document_starts():
    assert document_starts(DOCUMENTS)[0].tolist() == [0] * 4 + [4] * 8 + [12] * 7
    begun = document_starts(DOCUMENTS, CONTINUED["one"])
    assert begun[0].tolist() == document_starts(DOCUMENTS)[0].tolist() and (begun[1] < -S).all()

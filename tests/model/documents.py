"""Packed documents must not see each other: one check for every kind of layer."""

from __future__ import annotations

import torch

from megatron.model.stack import Model
from tests.float64 import EXACT
from tests.model.parity import named, relative

LENGTHS = [(5, 12, 7), (1, 2, 21)]  # of the documents in each of two samples of 24 tokens


def check_documents(model: Model, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """Loss and gradients of packed documents equal the separate documents, and differ from one long document.

    Args:
        tokens, labels: [2, 24].
    """
    numbers = torch.tensor([[i for i, length in enumerate(row) for _ in range(length)] for row in LENGTHS])
    positions = torch.tensor([[place for length in row for place in range(length)] for row in LENGTHS])

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in named(model).items()}

    ones = torch.ones(tokens.shape)
    packed = model(tokens, labels, ones, positions=positions, documents=numbers)[0]
    alone = 0.0
    for sample, row in enumerate(LENGTHS):
        for begin, length in zip((0, row[0], row[0] + row[1]), row):
            part = (slice(sample, sample + 1), slice(begin, begin + length))
            alone = alone + model(tokens[part], labels[part], torch.ones(1, length))[0]
    together = model(tokens, labels, ones)[0]
    assert relative(packed, alone) < EXACT and abs(together - alone) > 1e-4 * alone
    wanted = gradients(alone)
    for key, gradient in gradients(packed).items():
        assert relative(gradient, wanted[key]) < EXACT, key

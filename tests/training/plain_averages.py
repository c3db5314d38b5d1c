"""Schedule-free AdamW, written from its paper, for the plain run of `runs`: x, y and z side by side."""

from __future__ import annotations

import torch


class PlainScheduleFree:
    """Algorithm 1 of arXiv 2405.15682 with the weights of the authors' program, which omit AdamW's correction.

    The masters are y, where gradients are taken. `finish` makes them x.
    """

    def __init__(self, options, masters: list[torch.Tensor], rates: list, decays: list, epsilons: list) -> None:
        self.epsilons = epsilons
        self.options, self.masters, self.rates, self.decays = options, masters, rates, decays
        self.x, self.z = ([m.clone() for m in masters] for _ in range(2))
        self.square = [torch.zeros_like(m) for m in masters]
        self.t, self.total = 0, 0.0

    def step(self) -> None:
        self.t += 1
        (b1, b2), own, lr = self.options.betas, self.options.options, self.options.lr
        weight = self.t ** own.get("power", 0.0) * lr ** own.get("rate_power", 2.0)
        self.total += weight
        c = weight / self.total
        for i, y in enumerate(self.masters):
            self.square[i] = b2 * self.square[i] + (1 - b2) * y.grad**2
            size = (self.square[i] / (1 - b2**self.t)).sqrt() + self.epsilons[i]
            self.z[i] = self.z[i] - self.rates[i] * (y.grad / size + self.decays[i] * y.data)
            self.x[i] = (1 - c) * self.x[i] + c * self.z[i]
            y.data.copy_((1 - b1) * self.z[i] + b1 * self.x[i])

    def finish(self) -> None:
        for master, x in zip(self.masters, self.x):
            master.data.copy_(x)

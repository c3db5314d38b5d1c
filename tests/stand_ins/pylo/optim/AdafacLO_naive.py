"""small_fc_lopt, one tensor after the other: a `torch.optim.Optimizer` with the states and arguments of PyLO's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

TIMES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
# Numbers that training has added to the coefficients of the averages, as logarithms of 1 minus them, in tenths.
LEARNED = {
    "mom": ((0.9, 0.99, 0.999), (0.15216392, 0.14245212, 0.06812963)),
    "rms": ((0.999,), (0.01079706,)),
    "factored": ((0.9, 0.99, 0.999), (0.18621896, -0.10864615, -0.06185547)),
}


def coefficients(name: str) -> Tensor:
    begin, added = (torch.tensor(each) for each in LEARNED[name])
    return 1 - (1 - begin) * torch.exp(10 * added)


class Network(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, weights: dict[str, Tensor], layers: int) -> None:
        super().__init__()
        names = ["input", *(f"linear_{number}" for number in range(layers)), "output"]
        self.weights = nn.ParameterList([weights[f"network.{name}.weight"] for name in names])
        self.biases = nn.ParameterList([weights[f"network.{name}.bias"] for name in names])

    def forward(self, x: Tensor) -> Tensor:
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            x = F.linear(x if number == 0 else x.relu(), weight, bias)
        return x


class AdafacLO_naive(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, exp_mult=0.001, step_mult=0.01, weight_decay=0.0, hf_key="btherien/mulo"):
        settings = {"lr": lr, "exp_mult": exp_mult, "step_mult": step_mult, "weight_decay": weight_decay}
        super().__init__(params, settings)
        folder = Path(hf_key)
        layers = json.loads((folder / "config.json").read_text())["hidden_layers"]
        self.network = Network(load_file(folder / "model.safetensors"), layers)

    @torch.no_grad()
    def step(self, loss=None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                features = self.features(p, self.state[p])
                size = features.square().mean(tuple(range(p.dim())), keepdim=True)
                features = features * (1e-5 + size).rsqrt()
                time = torch.tanh((group["step"] - 1) / torch.tensor(TIMES, dtype=torch.float32) - 1.0)
                read = torch.cat([features, time.to(features).expand(*p.shape, -1)], -1)
                direction, magnitude = self.network(read).unbind(-1)
                p -= group["lr"] * group["step_mult"] * direction * torch.exp(group["exp_mult"] * magnitude)
                p -= group["lr"] * group["weight_decay"] * p

    def features(self, p: Tensor, state: dict[str, Tensor]) -> Tensor:
        """[..., 28]. The features of the step's number are not among them."""
        g, shape = p.grad.unsqueeze(-1), tuple(p.shape)
        long, longest = (int(d) for d in np.argsort(shape)[-2:]) if len(shape) > 1 else (None, None)
        if not state:
            state["mom"], state["rms"] = torch.zeros(*shape, 3), torch.zeros(*shape, 1)
            sizes = {"fac_vec_row": longest, "fac_vec_col": long, "fac_vec_v": None}
            for name, gone in sizes.items():
                used = (name == "fac_vec_v") == (long is None)
                kept = [n for d, n in enumerate(shape) if d != gone]
                state[name] = torch.zeros(*kept, 3) if used else torch.empty(0)
        state["mom"].lerp_(g.expand_as(state["mom"]).to(state["mom"]), 1 - coefficients("mom"))
        state["rms"].lerp_(g.square().to(state["rms"]), 1 - coefficients("rms"))
        beta, squares = coefficients("factored"), g.square().expand(*shape, 3) + 1e-30
        mom, rms = state["mom"], state["rms"]
        if long is None:
            state["fac_vec_v"] = beta * state["fac_vec_v"] + (1 - beta) * squares
            row = col = state["fac_vec_v"]
            factored = [g * (row + 1e-9).clamp(min=1e-9).rsqrt(), mom * (row + 1e-6).rsqrt()]
        else:
            for name, gone in (("fac_vec_row", longest), ("fac_vec_col", long)):
                state[name] = beta * state[name] + (1 - beta) * squares.mean(gone)
            row, col = state["fac_vec_row"], state["fac_vec_col"]
            mean = row.mean(long - (long > longest), keepdim=True)
            scale = (row / (mean + 1e-9)).clamp(min=1e-9).rsqrt().unsqueeze(longest)
            scale = scale * col.clamp(min=1e-9).rsqrt().unsqueeze(long)
            factored = [g * scale, mom * scale]
            row, col = row.unsqueeze(longest).expand(*shape, 3), col.unsqueeze(long).expand(*shape, 3)
        size = (rms + 1e-6).rsqrt()
        averages = [row, col, (row + 1e-8).rsqrt(), (col + 1e-8).rsqrt()]
        return torch.cat([g, p.unsqueeze(-1), mom, rms, mom * size, size, factored[0], *averages, factored[1]], -1)

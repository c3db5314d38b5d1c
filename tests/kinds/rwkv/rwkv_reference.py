"""RWKV-5, 6 and 7 token by token in the type of the weights, written from the papers, on tensors under their published
names.

Peng et al. 2024 (Eagle and Finch) and Peng et al. 2025 (Goose). One sample at a time: a loop over tokens, then over
layers, with all of an RWKV model's state in a dict.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    centred = x - x.mean()
    return centred / torch.sqrt(centred.square().mean() + epsilon) * weight + bias


def head_norm(x_hN: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    rows = [(row - row.mean()) / torch.sqrt((row - row.mean()).square().mean() + epsilon) for row in x_hN]
    return torch.cat(rows) * weight_C + bias_C


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def logits(
    z: Weights,
    tokens: list[int],
    version: int,
    heads: int,
    states: list[dict] | None = None,
    starts: frozenset[int] = frozenset(),
) -> Tensor:
    """[S, V]. `starts` are positions at which everything is forgotten."""
    time_mix = {5: time_mix5, 6: time_mix6, 7: time_mix7}[version]
    channel_mix = {5: channel_mix5, 6: channel_mix6, 7: channel_mix7}[version]
    layers = 1 + max(int(name.split(".")[1]) for name in z if name.startswith("blocks."))
    width = z["emb.weight"].shape[1]

    def nothing() -> list[dict]:
        zero = torch.zeros(width, dtype=z["emb.weight"].dtype)
        memory = torch.zeros(heads, width // heads, width // heads, dtype=z["emb.weight"].dtype)
        return [{"att": zero, "ffn": zero, "S": memory} for _ in range(layers)]

    states, rows = states or nothing(), []
    for place, token in enumerate(tokens):
        if place in starts:
            states = nothing()
        x = layer_norm(z["emb.weight"][token], z["blocks.0.ln0.weight"], z["blocks.0.ln0.bias"])
        shared: dict[str, Tensor] = {}
        for layer in range(layers):
            own = {name.split(".", 2)[2]: value for name, value in z.items() if name.startswith(f"blocks.{layer}.")}
            att = {name[4:]: value for name, value in own.items() if name.startswith("att.")}
            ffn = {name[4:]: value for name, value in own.items() if name.startswith("ffn.")}
            state = states[layer]
            normed = layer_norm(x, own["ln1.weight"], own["ln1.bias"])
            x = x + time_mix(att, normed, state, heads, layer, shared)
            state["att"] = normed
            normed = layer_norm(x, own["ln2.weight"], own["ln2.bias"])
            x = x + channel_mix(ffn, normed, state["ffn"])
            state["ffn"] = normed
        rows.append(z["head.weight"] @ layer_norm(x, z["ln_out.weight"], z["ln_out.bias"]))
    return torch.stack(rows)


def eagle_memory(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: dict, heads: int) -> Tensor:
    """Equations 19 and 20 of Eagle and Finch: S [keys, values] per head. Read with the bonus, then decay and write."""
    r, k, v, w, u = (each.reshape(heads, -1) for each in (r, k, v, w, u))
    written = k.unsqueeze(2) * v.unsqueeze(1)
    read = (r.unsqueeze(2) * (state["S"] + u.unsqueeze(2) * written)).sum(1)
    state["S"] = w.unsqueeze(2) * state["S"] + written
    return read


def time_mix5(z: Weights, x: Tensor, state: dict, heads: int, layer: int, shared: dict) -> Tensor:
    def mix(name: str) -> Tensor:
        share = z[f"time_mix_{name}"].flatten()
        return x * share + state["att"] * (1 - share)

    r, k, v = (z[f"{name}.weight"] @ mix(name[0]) for name in ("receptance", "key", "value"))
    g = silu(z["gate.weight"] @ mix("g"))
    w = torch.exp(-torch.exp(z["time_decay"].flatten()))
    o = eagle_memory(r, k, v, w, z["time_faaaa"].flatten(), state, heads)
    return z["output.weight"] @ (head_norm(o / 8, z["ln_x.weight"], z["ln_x.bias"], 1e-5) * g)


def time_mix6(z: Weights, x: Tensor, state: dict, heads: int, layer: int, shared: dict) -> Tensor:
    difference = state["att"] - x
    inner = torch.tanh((x + difference * z["time_maa_x"].flatten()) @ z["time_maa_w1"]).reshape(5, -1)
    mixed = {
        name: x + difference * (z[f"time_maa_{name}"].flatten() + inner[place] @ z["time_maa_w2"][place])
        for place, name in enumerate("wkvrg")
    }
    r, k, v = (z[f"{name}.weight"] @ mixed[name[0]] for name in ("receptance", "key", "value"))
    g = silu(z["gate.weight"] @ mixed["g"])
    moved = z["time_decay"].flatten() + torch.tanh(mixed["w"] @ z["time_decay_w1"]) @ z["time_decay_w2"]
    o = eagle_memory(r, k, v, torch.exp(-torch.exp(moved)), z["time_faaaa"].flatten(), state, heads)
    return z["output.weight"] @ (head_norm(o, z["ln_x.weight"], z["ln_x.bias"], 64e-5) * g)


def time_mix7(z: Weights, x: Tensor, state: dict, heads: int, layer: int, shared: dict) -> Tensor:
    def mix(name: str) -> Tensor:
        return x + (state["att"] - x) * z[f"x_{name}"].flatten()

    def vector(name: str) -> Tensor:
        return z[name].flatten()

    r, k, v = (z[f"{name}.weight"] @ mix(name[0]) for name in ("receptance", "key", "value"))
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(vector("w0") + torch.tanh(mix("w") @ z["w1"]) @ z["w2"]))
    a = torch.sigmoid(vector("a0") + mix("a") @ z["a1"] @ z["a2"])
    g = torch.sigmoid(mix("g") @ z["g1"]) @ z["g2"]
    if layer == 0:
        shared["v_first"] = v
    else:
        v = v + (shared["v_first"] - v) * torch.sigmoid(vector("v0") + mix("v") @ z["v1"] @ z["v2"])
    removed = (k * vector("k_k")).reshape(heads, -1)
    removed = removed / removed.square().sum(1, keepdim=True).sqrt()
    k = k * (1 + (a - 1) * vector("k_a"))
    r, w, k, v, a = (each.reshape(heads, -1) for each in (r, w, k, v, a))
    read, bonus = [], []
    S = []
    for head in range(heads):
        old, kk = state["S"][head], removed[head]
        new = old @ torch.diag(w[head]) - torch.outer(old @ kk, kk * a[head]) + torch.outer(v[head], k[head])
        S.append(new)
        read.append(new @ r[head])
        bonus.append((r[head] * k[head] * z["r_k"][head]).sum() * v[head])
    state["S"] = torch.stack(S)
    y = head_norm(torch.stack(read), z["ln_x.weight"], z["ln_x.bias"], 64e-5) + torch.cat(bonus)
    return z["output.weight"] @ (y * g)


def channel_mix5(z: Weights, x: Tensor, last: Tensor) -> Tensor:
    xk, xr = (x * z[f"time_mix_{name}"].flatten() + last * (1 - z[f"time_mix_{name}"].flatten()) for name in "kr")
    return torch.sigmoid(z["receptance.weight"] @ xr) * (
        z["value.weight"] @ (z["key.weight"] @ xk).clamp_min(0).square()
    )


def channel_mix6(z: Weights, x: Tensor, last: Tensor) -> Tensor:
    xk, xr = (x + (last - x) * z[f"time_maa_{name}"].flatten() for name in "kr")
    return torch.sigmoid(z["receptance.weight"] @ xr) * (
        z["value.weight"] @ (z["key.weight"] @ xk).clamp_min(0).square()
    )


def channel_mix7(z: Weights, x: Tensor, last: Tensor) -> Tensor:
    return z["value.weight"] @ (z["key.weight"] @ (x + (last - x) * z["x_k"].flatten())).clamp_min(0).square()

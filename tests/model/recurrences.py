"""Recurrences token by token in float64, one sample and one head or channel at a time, written from the papers."""

from __future__ import annotations

import torch
from torch import Tensor


def mamba2_head(
    x_SP: Tensor, dt_S: Tensor, A: Tensor, D: Tensor, B_SN: Tensor, C_SN: Tensor, state_PN: Tensor, starts: list[int]
):
    """Dao and Gu 2024, equation 1 with a scalar A: outputs [S, P] and the last state."""
    rows = []
    for t in range(len(dt_S)):
        if starts[t] == t:
            state_PN = torch.zeros_like(state_PN)
        state_PN = torch.exp(dt_S[t] * A) * state_PN + dt_S[t] * torch.outer(x_SP[t], B_SN[t])
        rows.append(state_PN @ C_SN[t] + D * x_SP[t])
    return torch.stack(rows), state_PN


def mamba_channel(
    u_S: Tensor, dt_S: Tensor, A_N: Tensor, D: Tensor, B_SN: Tensor, C_SN: Tensor, state_N: Tensor, starts: list[int]
):
    """Gu and Dao 2023, equation 2a, zero-order hold for A, Euler's rule for B: outputs [S] and the last state."""
    rows = []
    for t in range(len(dt_S)):
        if starts[t] == t:
            state_N = torch.zeros_like(state_N)
        state_N = torch.exp(dt_S[t] * A_N) * state_N + dt_S[t] * B_SN[t] * u_S[t]
        rows.append((state_N * C_SN[t]).sum() + D * u_S[t])
    return torch.stack(rows), state_N


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp_min(0)


def delta_head(
    q_SK: Tensor, k_SK: Tensor, v_SV: Tensor, decay: Tensor, beta_S: Tensor, state_KV: Tensor, starts: list[int]
):
    """Yang, Kautz and Hatamizadeh 2024, equation 10, with the state transposed and decays as logarithms: outputs [S, V]
    and the last state. Decays [S], or [S, K] as in equation 1 of Kimi Linear (Kimi Team 2025)."""
    rows = []
    for t in range(len(beta_S)):
        if starts[t] == t:
            state_KV = torch.zeros_like(state_KV)
        state_KV = torch.exp(decay[t]).unsqueeze(-1) * state_KV
        state_KV = state_KV - beta_S[t] * torch.outer(k_SK[t], k_SK[t] @ state_KV)
        state_KV = state_KV + beta_S[t] * torch.outer(k_SK[t], v_SV[t])
        rows.append(q_SK[t] @ state_KV)
    return torch.stack(rows), state_KV

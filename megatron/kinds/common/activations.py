"""The activations of feed-forward networks, and the tensors that each keeps for the backward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor


def scaled(x: Tensor, multiplier: float) -> Tensor:
    """x * multiplier, and x itself for 1."""
    return x if multiplier == 1.0 else x * multiplier


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """xIELU (Huang and Schlag 2024): p x^2 + x/2 above 0 and n (e^x - 1 - x) + x/2 below, p = softplus(alpha_p), n =
    1/2 + softplus(alpha_n). Both alphas have one element."""
    above = x.relu()
    below = x - above
    return F.softplus(alpha_p) * above.square() + (0.5 + F.softplus(alpha_n)) * (below.expm1() - below) + 0.5 * x


# Number of tensors of the MLP's width that derivatives need, plain and gated. Gate and up are one tensor, saved
# together if either is.
SAVED = {
    "gelu": (2, 4),
    "gelu_tanh": (2, 4),
    "silu": (2, 4),
    "relu": (1, 4),
    "relu2": (2, 5),
    "identity": (1, 3),
    "quick_gelu": (3, 5),
    "xielu": (5, 8),
}

"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024) as matrix products over chunks of the sequence.

Shapes: B samples, S positions, c chunks of Q positions. There are g heads of queries and keys with K channels, and
h = g r heads of values with V channels. r consecutive heads of values share one of keys.

    S_t = exp(d_t) S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T      S [V, K] per head, kept here as its transpose
    y_t = S_t q_t / sqrt(K)                                         q and k of length 1

The decay is a number per head, or per channel of keys (Kimi Team 2025, arXiv 2510.26692): then exp(d_t) multiplies the
columns of S_{t-1}. At position t of a chunk the state gets n_t = b_t (v_t - value of the decayed state under k_t). The
state depends on the state before the chunk and the n of earlier positions. So all n of a chunk solve one triangular
system with the right-hand sides b_t v_t and b_t k_t. It is the WY form (Bischof and Van Loan 1987, Yang et al. 2024,
section 3.2)."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kinds.common.recurrence.decays import decays, products_by_channel, stretches
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.parallel.layout.precision import at_least_fp32

LENGTH_EPSILON = 1e-6  # added to the square of the length of queries and keys


def gated_delta_rule(
    q_BSgK: Tensor,
    k_BSgK: Tensor,
    v_BShV: Tensor,
    decay: Tensor,
    beta_BSh: Tensor,
    *,
    chunk: int,
    initial_BhKV: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state after the last position, fp32 inside. Only the inputs are kept for the gradient.

    Args:
        q_BSgK, k_BSgK: of any length. Brought to length 1 here.
        decay: logarithms of the decays [B, S, h] or, by channel, [B, S, h, K], at most 0, fp32.
        beta_BSh: share of the value under the key that is replaced, in [0, 2], fp32.
        chunk: changes memory and speed, not the result.
        initial_BhKV: state before the first position. Zero if None.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.

    Returns:
        y [B, S, h, V] of v's type, and the state [B, h, K, V] in fp32.
    """
    rule = functools.partial(_rule, chunk=min(chunk, v_BShV.shape[1]))
    return recomputed(rule, q_BSgK, k_BSgK, v_BShV, decay, beta_BSh, initial_BhKV, starts_BS)


def ends(
    k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """The state [B, h, K, V] from zeros, and the factor [B, h, K, K] of a state before the sequence.

    Arguments are as in `gated_delta_rule`. `recomputed` should call it."""
    own, held, keys, through, _, _ = _chunks(k, v, decay, beta, starts, min(chunk, v.shape[1]))
    (B, _, h, _, V), K = own.shape, keys.shape[-1]
    one = torch.eye(K, dtype=own.dtype, device=own.device).expand(B, h, K, K)
    # The columns of a state are independent. The columns behind the values become the factor.
    both = torch.cat([own.new_zeros(B, h, K, V), one], -1)
    *_, final = _carry(F.pad(own, (0, K)), held, keys, through, both)
    return final[..., :V], final[..., V:]


def _chunks(
    k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """In chunks: solutions for b v (`own`) and b k (`held`) [B, c, h, Q, V or K], and keys decayed to the end.

    Then decays through chunks and from their begin, of K channels or 1, and a function. It gives the decayed products
    of queries [B, c, g, Q, K] with keys."""
    K, V, heads, room = k.shape[-1], v.shape[-1], v.shape[2], -v.shape[1] % chunk
    k, v, decay, beta = (in_chunks(each, chunk) for each in (k, v, decay, beta))
    k, v = (each.transpose(2, 3) for each in (_unit(k), v))  # [B, c, heads, Q, channels]
    keys = of_values(k, v)
    if decay.dim() == 4:
        inside, to_end, from_begin, through = decays(decay, starts, room, chunk)

        def seen(x_BcgQK: Tensor) -> Tensor:
            return of_values(x_BcgQK @ k.transpose(-1, -2), v) * inside

    else:
        total, causal, to_end, from_begin, through = stretches(decay.flatten(3), starts, room, chunk)
        total = total.unflatten(-1, (heads, K)).transpose(2, 3)

        def seen(x_BcgQK: Tensor) -> Tensor:
            return products_by_channel(of_values(x_BcgQK, v), keys, total, causal)

    to_end, from_begin, through, beta = (x.unflatten(-1, (heads, -1)) for x in (to_end, from_begin, through, beta))
    to_end, from_begin, beta = (each.transpose(2, 3) for each in (to_end, from_begin, beta))
    overlaps = seen(k) * beta
    sides = torch.cat([v, keys * from_begin], -1) * beta
    # only elements below the diagonal are read, and the diagonal is 1
    own, held = torch.linalg.solve_triangular(overlaps, sides, upper=False, unitriangular=True).split([V, K], -1)
    return own, held, keys * to_end, through, from_begin, seen


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, S, ...] to [B, c, Q, ...] in fp32, with zeros behind the last position."""
    room = -x.shape[1] % chunk
    return F.pad(at_least_fp32(x), (0, 0) * (x.dim() - 2) + (0, room)).unflatten(1, (-1, chunk))


def of_values(x: Tensor, v: Tensor) -> Tensor:
    """Tensors of heads of keys, repeated for the heads of values."""
    return x.repeat_interleave(v.shape[2] // x.shape[2], 2)


def _rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, past: Tensor | None, starts: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    dtype, length, K = v.dtype, k.shape[1], k.shape[-1]
    own, held, keys, through, from_begin, seen = _chunks(k, v, decay, beta, starts, chunk)
    q = (_unit(in_chunks(q, chunk)) * K**-0.5).transpose(2, 3)
    new, before, final = _carry(own, held, keys, through, past)
    y = (of_values(q, own) * from_begin) @ before + seen(q) @ new
    return y.transpose(2, 3).flatten(1, 2)[:, :length].to(dtype), final


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPSILON)


def _carry(
    own_BchQV: Tensor, held_BchQK: Tensor, keys_BchQK: Tensor, through_BchK: Tensor, initial_BhKV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """n [B, c, h, Q, V], the state before each chunk [B, c, h, K, V], the last state. n = own - held @ state."""
    state = initial_BhKV
    if state is None:
        state = own_BchQV.new_zeros((*own_BchQV[:, 0, :, 0, 0].shape, keys_BchQK.shape[-1], own_BchQV.shape[-1]))
    state, written, before = at_least_fp32(state), [], []
    for own, held, keys, through in zip(*(x.unbind(1) for x in (own_BchQV, held_BchQK, keys_BchQK, through_BchK))):
        before.append(state)
        written.append(own - held @ state)
        state = state * through[..., None] + keys.transpose(-1, -2) @ written[-1]
    return torch.stack(written, 1), torch.stack(before, 1), state

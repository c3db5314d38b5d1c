"""The recurrence of RWKV-5 and RWKV-6 (Peng et al. 2024): a matrix per head, whose keys decay each at its own rate.

Shapes: B samples, S positions, h heads of N channels, c runs of Q positions. Per head, with S [N keys, N values]:

    y_t = r_t (S_{t-1} + diag(u) k_t^T v_t)
    S_t = diag(w_t) S_{t-1} + k_t^T v_t           w = exp(-exp(decay)), anything between 0 and 1

A piece of up to `chunk` positions is scanned at a time, in about sqrt(chunk) runs side by side. Inside the runs the
scan goes distance by distance, with products of decays that cannot overflow. Then it goes from run to run."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.parallel.layout.precision import at_least_fp32, wide_type

from ..common.recurrence.pieces import Runs, pieces


def inside_runs(r_BcQhN: Tensor, k_BcQhN: Tensor, v_BcQhN: Tensor, log_w_BcQhN: Tensor, runs: Runs) -> Tensor:
    """y [B, c, Q, h, N], of fp32 tensors, distance by distance. The decays may be the same for all samples (B = 1).

    With P_d the product of the d - 1 decays between a token and the one d before it, which cannot overflow:

        y_t = sum_d s_td v_{t-d}          s_td = sum_N r_t k_{t-d} P_d

    Keeps Q / 2 numbers per channel and token for the gradient, so `recomputed` should call it."""
    if torch.is_grad_enabled():
        return _Inside.apply(r_BcQhN, k_BcQhN, v_BcQhN, log_w_BcQhN, runs)
    return _inside(r_BcQhN, k_BcQhN, v_BcQhN, log_w_BcQhN, runs)


def _inside(r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, runs: Runs, keep: list[Tensor] | None = None) -> Tensor:
    """y. P_d and s_d of every distance are added to `keep`."""
    w, y, passed = log_w.exp(), torch.zeros_like(r), torch.ones_like(log_w)
    for distance in range(1, runs.run):
        passed = passed[:, :, 1:] if distance == 1 else passed[:, :, 1:] * w[:, :, 1 : 1 - distance]
        score = (r[:, :, distance:] * k[:, :, :-distance]).mul_(passed).sum(-1, keepdim=True)
        _hide(score, distance, runs)
        y[:, :, distance:].addcmul_(score, v[:, :, :-distance])
        if keep is not None:
            keep += passed, score
    return y


def _hide(score_BcQh1: Tensor, distance: int, runs: Runs) -> None:
    """Set scores to 0 where a token does not see the one `distance` before it. The rows begin with token `distance`."""
    if runs.starts is not None:
        score_BcQh1 *= runs.sees(distance)[:, :, distance:, None, None]


class _Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, runs: Runs) -> Tensor:
        made: list[Tensor] = []
        y, ctx.runs, ctx.rates = _inside(r, k, v, log_w, runs, made), runs, len(log_w)
        ctx.save_for_backward(r, k, v, *made)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, ...]:
        r, k, v, *made = ctx.saved_tensors
        of_r, of_k, of_v, of_log_w, of_log_passed = (torch.zeros_like(r) for _ in range(5))
        for distance in reversed(range(1, ctx.runs.run)):
            passed, score = made[2 * distance - 2 : 2 * distance]
            here, there = (
                (slice(None), slice(None), slice(distance, None)),
                (slice(None), slice(None), slice(-distance)),
            )
            of_score = (of_y[here] * v[there]).sum(-1, keepdim=True)
            _hide(of_score, distance, ctx.runs)
            of_v[there].addcmul_(of_y[here], score)
            part = passed * of_score
            of_r[here].addcmul_(part, k[there])
            part *= r[here]
            of_k[there] += part
            if distance > 1:  # a decay is in the products of all distances beyond it: no differences of large sums
                of_log_passed[here].addcmul_(part, k[there])
                of_log_w[:, :, 1 : 1 - distance] += of_log_passed[here]
        return of_r, of_k, of_v, of_log_w if ctx.rates == len(r) else of_log_w.sum(0, keepdim=True), None


MOST = 5.3  # of a decay. exp(-exp(5.3)) = e^-200 is 0 in fp32, and larger rates would make sums less exact


def wkv6(
    r_BShN: Tensor,
    k_BShN: Tensor,
    v_BShN: Tensor,
    moved_BShN: Tensor | None,
    decay_hN: Tensor,
    bonus_hN: Tensor,
    *,
    chunk: int,
    initial_BhNN: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, S, h, N] of r's type and the state after the last position [B, h, N, N] in fp32. fp32 inside.

    Args:
        moved_BShN: what each token adds to `decay` (RWKV-6). None is nothing.
        initial_BhNN: state before the first position. Zero if None.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.
    """
    state = initial_BhNN
    if state is None:
        b, _, h, n = r_BShN.shape
        state = r_BShN.new_zeros((b, h, n, n), dtype=wide_type(r_BShN.dtype))
    tensors = [r_BShN, k_BShN, v_BShN] + ([] if moved_BShN is None else [moved_BShN])
    outputs = []
    for parts, starts in pieces(tensors, chunk, starts_BS):
        r, k, v, moved = (*parts, None)[:4]
        y, state = recomputed(_piece, r, k, v, moved, decay_hN, bonus_hN, state, starts)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def ends(
    k: Tensor, v: Tensor, moved: Tensor | None, decay: Tensor, starts: Tensor | None, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """The state [B, h, N, N] from zeros, and the decays of the keys [B, h, N, 1]. Arguments are as in `wkv6`."""
    b, _, h, n = k.shape
    state = k.new_zeros((b, h, n, n), dtype=wide_type(k.dtype))
    left = torch.ones_like(state[..., :1])
    for parts, begun in pieces([k, v] + ([] if moved is None else [moved]), chunk, starts):
        state, left = recomputed(_end, *(*parts, None)[:3], decay, state, left, begun)
    return state, left


def _end(
    k: Tensor, v: Tensor, moved: Tensor | None, decay: Tensor, state: Tensor, left: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    runs = Runs.of(k.shape[1], starts, k.device)
    log_w, k, v = (runs.cut(each) for each in (_rates(k, moved, decay), at_least_fp32(k), at_least_fp32(v)))
    written, through, _ = _between(runs, k, v, log_w)
    for through_c, written_c in zip(through.expand(-1, written.shape[1], -1, -1, -1).unbind(1), written.unbind(1)):
        state, left = through_c * state + written_c, through_c * left
    return state, left


def _rates(k: Tensor, moved: Tensor | None, decay: Tensor) -> Tensor:
    rates = decay.expand(1, k.shape[1], *decay.shape) if moved is None else decay + at_least_fp32(moved)
    return -rates.clamp(max=MOST).exp()


def _between(runs: Runs, k: Tensor, v: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Additions of each run to the state, the decays of keys over each run, and up to each of its positions."""
    total = log_w.double().cumsum(2)  # a difference of two large sums must keep the digits of a short stretch
    last = total[:, :, -1:]
    from_begin, to_end, through = (each.to(log_w.dtype).exp() for each in (total - log_w, last - total, last[:, :, 0]))
    through = through.unsqueeze(-1)
    reads, keeps = runs.reads_state, runs.keeps_state
    if reads is not None and keeps is not None:
        from_begin = from_begin * reads[..., None, None]
        to_end = to_end * runs.writes_state[..., None, None]
        through = through * keeps[..., None, None, None]
    return torch.einsum("bcqhk,bcqhv->bchkv", k * to_end, v), through, from_begin


def _piece(
    r: Tensor, k: Tensor, v: Tensor, moved: Tensor | None, decay: Tensor, u: Tensor, past: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype, runs = r.dtype, Runs.of(r.shape[1], starts, r.device)
    log_w, r, k, v = (
        runs.cut(each) for each in (_rates(r, moved, decay), at_least_fp32(r), at_least_fp32(k), at_least_fp32(v))
    )
    y = torch.addcmul(inside_runs(r, k, v, log_w, runs), (r * k * u).sum(-1, keepdim=True), v)
    written, through, from_begin = _between(runs, k, v, log_w)
    state, before = past, []
    for through_c, written_c in zip(through.expand(-1, written.shape[1], -1, -1, -1).unbind(1), written.unbind(1)):
        before.append(state)
        state = through_c * state + written_c
    y = y + torch.einsum("bcqhk,bchkv->bcqhv", r * from_begin, torch.stack(before, 1))
    return runs.joined(y).to(dtype), state

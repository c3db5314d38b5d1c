"""The recurrence of RWKV-4 (Peng et al. 2023): per channel a mean of the values, weighted by keys and by age.

Shapes: B samples, S positions, d channels, c runs of Q positions.

    wkv_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same without v)          w = -exp(decay)

All exponents are relative to the largest of a token's, so that none overflows and no sum is 0. A piece of up to `chunk`
positions is scanned at a time, in about sqrt(chunk) runs side by side: inside the runs distance by distance, then from
run to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.rwkv.runs import Runs, earlier_in_run, pieces
from megatron.parallel.layout.precision import at_least_fp32, wide_type

NOTHING = -1e38  # exponent of missing terms

State = tuple[Tensor, Tensor, Tensor]


def wkv4(
    k_BSd: Tensor,
    v_BSd: Tensor,
    decay_d: Tensor,
    bonus_d: Tensor,
    *,
    chunk: int,
    initial: State | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, State]:
    """wkv [B, S, d] of v's type and the state after the last position, fp32 inside.

    Args:
        initial: the sums with and without v, and the exponent that both are relative to, [B, d] each in fp32.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.
    """
    if initial is None:
        zero = k_BSd.new_zeros((k_BSd.shape[0], k_BSd.shape[2]), dtype=wide_type(k_BSd.dtype))
        initial = (zero, zero, zero + NOTHING)
    state, outputs = initial, []
    for (k, v), starts in pieces([k_BSd, v_BSd], chunk, starts_BS):
        y, above, below, largest = recomputed(_piece, k, v, decay_d, bonus_d, *state, starts)
        state = above, below, largest
        outputs.append(y)
    return torch.cat(outputs, 1), state


def ends(
    k_BSd: Tensor, v_BSd: Tensor, decay_d: Tensor, starts_BS: Tensor | None, *, chunk: int
) -> tuple[State, Tensor]:
    """The state from zeros, and the addition to the exponent of a state before, [B, d]. Arguments as in
    `wkv4`."""
    zero = k_BSd.new_zeros((k_BSd.shape[0], k_BSd.shape[2]), dtype=wide_type(k_BSd.dtype))
    state = (zero, zero, zero + NOTHING)
    for (k, v), starts in pieces([k_BSd, v_BSd], chunk, starts_BS):
        state = recomputed(_end, k, v, decay_d, *state, starts)
    aged = zero - k_BSd.shape[1] * decay_d.exp()
    return state, aged if starts_BS is None else aged.masked_fill(starts_BS[:, -1:] >= 0, NOTHING)


def joined(aged: Tensor, earlier: State, later: State, there: bool) -> State:
    """The state after two parts of a sequence. The later part adds `aged` to exponents.

    Args:
        there: whether there is an earlier state.
    """
    exponent = later[2].detach()
    old = (earlier[2].detach() + aged).clamp(min=NOTHING) if there else torch.full_like(aged, NOTHING)
    reference = torch.maximum(old, exponent).detach()
    before, new = (old - reference).exp(), (exponent - reference).exp()
    return earlier[0] * before + later[0] * new, earlier[1] * before + later[1] * new, reference


def _end(
    k: Tensor, v: Tensor, decay: Tensor, numerator: Tensor, denominator: Tensor, largest: Tensor, starts: Tensor | None
) -> State:
    runs = Runs.of(k.shape[1], starts, k.device)
    k, v = runs.cut(at_least_fp32(k)), runs.cut(at_least_fp32(v))
    return _between(runs, k, v, -decay.exp(), (numerator, denominator, largest))[1]


def _piece(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    largest: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, runs, w = v.dtype, Runs.of(k.shape[1], starts, k.device), -decay.exp()
    k, v = runs.cut(at_least_fp32(k)), runs.cut(at_least_fp32(v))
    (numerators, denominators, exponents), state = _between(runs, k, v, w, (numerator, denominator, largest))

    steps = torch.arange(runs.run, device=k.device).view(1, 1, -1, 1)
    of_state = exponents.unsqueeze(2) + steps * w
    reads = runs.reads_state
    if reads is not None:
        of_state = of_state.masked_fill(~reads.unsqueeze(-1), NOTHING)
    terms = [bonus + k]
    for distance in range(1, runs.run):
        seen = runs.sees(distance).unsqueeze(-1)
        terms.append((earlier_in_run(k, distance) + (distance - 1) * w).masked_fill(~seen, NOTHING))
    top = of_state.detach()
    for term in terms:
        top = torch.maximum(top, term.detach())
    weight = (of_state - top).exp()
    above, below = weight * numerators.unsqueeze(2), weight * denominators.unsqueeze(2)
    for distance, term in enumerate(terms):
        weight = (term - top).exp()
        above, below = above + weight * earlier_in_run(v, distance), below + weight
    return runs.joined(above / below).to(dtype), *state


def _between(runs: Runs, k: Tensor, v: Tensor, w: Tensor, state: State) -> tuple[State, State]:
    """The state before each run, [B, c, d] each, and after the last. Exponents of reference have no gradient: what is
    relative to them changes by the opposite factor."""
    written = runs.writes_state.unsqueeze(-1)
    count = (runs.places < runs.length).sum(-1)  # tokens of each run
    left = (count.unsqueeze(-1) - 1 - torch.arange(runs.run, device=k.device)).unsqueeze(-1)
    terms = (k + left * w).masked_fill(~written, NOTHING)
    top = terms.detach().amax(2)
    weights = (terms - top.unsqueeze(2)).exp()
    own = zip((weights * v).sum(2).unbind(1), weights.sum(2).unbind(1), top.unbind(1))
    passed = count.view(1, -1, 1) * w
    keeps = runs.keeps_state
    if keeps is not None:
        passed = passed.masked_fill(~keeps.unsqueeze(-1), NOTHING)
    before = []
    for (above, below, exponent), decay in zip(own, passed.expand(-1, k.shape[1], -1).unbind(1)):
        before.append(state)
        aged = (state[2] + decay).clamp(min=NOTHING)
        reference = torch.maximum(aged, exponent).detach()
        old, new = (aged - reference).exp(), (exponent - reference).exp()
        state = (state[0] * old + above * new, state[1] * old + below * new, reference)
    numerators, denominators, exponents = (torch.stack(each, 1) for each in zip(*before))
    return (numerators, denominators, exponents), state

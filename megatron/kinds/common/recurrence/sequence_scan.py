"""Recurrences over a sequence whose tokens ranks share, in scan form.

Each rank computes the state after its tokens from zeros (`made`), and the linear map of its tokens on a state before
them (`left`). The state before each rank's first token follows in steps that each double the distance. Then all ranks
compute their outputs at once (Blelloch 1990). Gradients return in the same way. No rank waits for another one's
outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from megatron.model.stream import Stream
from megatron.parallel.layers.context import ContextGroup

from .convolution import last_taps
from .pieces import Continued, piece_starts, shared_starts

Parts = tuple[Tensor, ...]
State = TypeVar("State", bound=Parts)


def carried(
    context: ContextGroup,
    made: State,
    left: Callable[[], Tensor],
    join: Callable[[Tensor, State, State, bool], State],
    compose: Callable[[Tensor, Tensor], Tensor],
    before: State | None = None,
) -> State:
    """The state before this rank's first token. Without `before`, zeros on the first rank.

    Args:
        made: the state after this rank's tokens from zeros, tensors of one type.
        left: makes the map of this rank's tokens on a state, in any form. Called only where it is needed.
        join: (left, earlier state, later state from zeros, whether there is an earlier one) to the state after both.
        compose: (later left, earlier left) to the map of both.
        before: the state before the first rank's first token, as `to_first` gives it.
    """
    if before is not None:  # the first rank's tokens continue from it, and its numbers are zeros on other ranks
        passed = left()
        state = carried(context, join(passed, before, made, context.rank == 0), lambda: passed, join, compose)
        return cast(State, tuple(own + first for own, first in zip(state, before)))
    if context.size == 2:
        return cast(State, _from_before(context, made, 1))
    *parts, passed = _from_before(context, (*made, left()), 1)
    state, reach = cast(State, tuple(parts)), 1
    while reach < context.size - 1:
        further = 2 * reach < context.size - 1
        *parts, earlier = _from_before(context, (*state, passed) if further else (*state, passed[:0]), reach)
        state = join(passed, cast(State, tuple(parts)), state, context.rank > reach)
        if further:
            passed = compose(passed, earlier)
        reach *= 2
    return state


def carried_by_decay(context: ContextGroup, made: Tensor, left: Tensor, before: Tensor | None = None) -> Tensor:
    """`carried` of a state whose numbers decay separately.

    Args:
        left: the decay, broadcast to the state's shape.
    """

    def join(left: Tensor, earlier: tuple[Tensor], later: tuple[Tensor], there: bool) -> tuple[Tensor]:
        return (earlier[0] * left + later[0],)

    return carried(context, (made,), lambda: left, join, torch.mul, None if before is None else (before,))[0]


def carried_by_matrix(
    context: ContextGroup, made: Tensor, left: Callable[[], Tensor], before: Tensor | None = None
) -> Tensor:
    """`carried` of states [..., K, V] that decay by a product with matrices `left` [..., K, K]."""

    def join(left: Tensor, earlier: tuple[Tensor], later: tuple[Tensor], there: bool) -> tuple[Tensor]:
        return (left @ earlier[0] + later[0],)

    return carried(context, (made,), left, join, torch.matmul, None if before is None else (before,))[0]


def _from_before(context: ContextGroup, parts: Parts, by: int) -> Parts:
    """`ContextGroup.from_before` of several tensors, in one message."""
    sizes = [each.numel() for each in parts]
    whole = context.from_before(torch.cat([each.reshape(-1) for each in parts]), by)
    return tuple(each.view(own.shape) for each, own in zip(whole.split(sizes), parts))


def last_document(context: ContextGroup, stream: Stream) -> Tensor | None:
    """int [B], the document of a piece's last token, for the next one. None where there are no documents."""
    documents_BS = stream.documents
    return None if documents_BS is None else context.to_first(documents_BS[:, -1])


def document_begins(stream: Stream, state: Continued | None, context: ContextGroup) -> Tensor | None:
    """`document_starts` of a stream, of a piece of it, or of this rank's part of one."""
    return piece_starts(stream, state) if context.size == 1 else shared_starts(stream, context, state)


def token_before(context: ContextGroup, x_BSH: Tensor, last_B1H: Tensor | None) -> Tensor | None:
    """The token before the first: of the state, or the last one of the rank before."""
    return last_B1H if context.size == 1 else _either(context.from_before(x_BSH[:, -1:]), last_B1H)


def taps_before(
    context: ContextGroup, x_BSC: Tensor, past_BKC: Tensor | None, taps: int, starts_BS: Tensor | None
) -> Tensor | None:
    """The inputs of a convolution before the first: of the state, or the last ones of the rank before.

    Raises:
        ValueError: this rank has fewer tokens than the next one reads.
    """
    if context.size == 1:
        return past_BKC
    if x_BSC.shape[1] < taps - 1:
        raise ValueError(f"a rank has {x_BSC.shape[1]} tokens, and the next one reads its last {taps - 1}")
    return _either(context.from_before(last_taps(x_BSC, None, taps, starts_BS)), past_BKC)


def taps_after(
    context: ContextGroup, x_BSC: Tensor, before_BKC: Tensor | None, taps: int, starts_BS: Tensor | None
) -> Tensor:
    """The inputs of a convolution for the next piece of a sequence.

    Args:
        before_BKC: of `taps_before`.
    """
    return context.to_first(last_taps(x_BSC, before_BKC, taps, starts_BS))


def _either(of_rank_before: Tensor, of_state: Tensor | None) -> Tensor:
    """The sum of both. One is zeros: the first rank has no rank before it, and others no state."""
    return of_rank_before if of_state is None else of_rank_before + of_state.to(of_rank_before.dtype)

"""Recurrent layers over a sequence whose tokens ranks share: each rank continues from the state of the rank before.

A layer sends its decoding state (`new_state`) to the next rank: the memory of a recurrence, the last inputs of a
convolution, the last token and its document. In the backward pass the gradient of that state returns. So every such
layer computes the same as in one process, with one exchange of a state. The ranks compute such a layer one after the
other, and other layers at the same time.

A repeated forward pass (recomputation) uses the states of the first pass, and sends none."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.pattern import Kind
from megatron.config.sections.model import ModelSection
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.mesh import Axis

from .options import kind_of
from .recompute import decide_once, repeating
from .stream import Stream

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_HEADER = 128  # numbers of a header: type, dimensions and sizes of each field of a state
Form = tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...]  # of each field of a state, None where it has none


def _describe(tensors: list[Tensor | None]) -> Form:
    return tuple(None if each is None else (each.dtype, tuple(each.shape)) for each in tensors)


def _send(tensor: Tensor, axis: Axis, to: int) -> None:
    dist.send(tensor.detach().contiguous(), axis.ranks[to], group=axis.group)


def _receive(like: tuple[torch.dtype, tuple[int, ...]], device: torch.device, axis: Axis, source: int) -> Tensor:
    found = torch.empty(like[1], dtype=like[0], device=device)
    dist.recv(found, axis.ranks[source], group=axis.group)
    return found


def _send_form(form: Form, device: torch.device, axis: Axis, to: int) -> None:
    numbers = []
    for each in form:
        numbers += [-1] if each is None else [_TYPES.index(each[0]), len(each[1]), *each[1]]
    header = torch.full((_HEADER,), -2, dtype=torch.int64)
    header[: len(numbers)] = torch.tensor(numbers)
    _send(header.to(device), axis, to)


def _receive_form(device: torch.device, axis: Axis, source: int) -> Form:
    numbers = iter(_receive((torch.int64, (_HEADER,)), device, axis, source).tolist())
    found: list[tuple[torch.dtype, tuple[int, ...]] | None] = []
    for number in numbers:
        if number == -2:
            break
        found.append(None if number == -1 else (_TYPES[number], tuple(next(numbers) for _ in range(next(numbers)))))
    return tuple(found)


class _Take(torch.autograd.Function):
    """x, and the tensors of the rank before. Their gradients return to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, *received: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.floats = axis, [each.is_floating_point() for each in received]
        ctx.mark_non_differentiable(*(each for each in received if not each.is_floating_point()))
        return x.view_as(x), *(each.view_as(each) for each in received)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, *gradients: Tensor) -> tuple[Any, ...]:
        for gradient, is_float in zip(gradients, ctx.floats):
            if is_float:
                _send(gradient, ctx.axis, ctx.axis.rank - 1)
        return of_x, None, *(None for _ in gradients)


class _Hand(torch.autograd.Function):
    """y, after sending the tensors to the next rank. In the backward pass their gradients come from there."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Axis, *sent: Tensor) -> Tensor:
        ctx.axis, ctx.form = axis, _describe(list(sent))
        if not repeating():
            for each in sent:
                _send(each, axis, axis.rank + 1)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Any, ...]:
        found = [
            _receive(each, of_y.device, ctx.axis, ctx.axis.rank + 1) if each[0].is_floating_point else None
            for each in ctx.form
        ]
        return of_y, None, *found


class Relay:
    """Sends the states of one layer along the ranks of an axis, which share a sequence."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.taken: dict[Any, Form] = {}  # the forms of states by the input's form, so that each is sent once
        self.handed: dict[Any, Form] = {}

    def __call__(self, state: Any, x: Tensor, call: Callable[[Tensor, Any], Any]) -> Any:
        """`call(x, state)` with the state of the rank before. The state after it goes to the next rank.

        Args:
            state: an empty state, a dataclass of tensors.
            x: the layer's input.
        """
        key = (tuple(x.shape), x.dtype)
        if self.axis.rank > 0:
            x = self._take(state, x, key)
        y = call(x, state)
        if self.axis.rank + 1 == self.axis.size:
            return y
        return self._hand(state, y, key) if isinstance(y, Tensor) else (self._hand(state, y[0], key), *y[1:])

    def through(self, layer: nn.Module, x: Tensor, stream: Stream) -> Any:
        """A layer's output, from the state of the rank before."""
        return self(new_state(layer), x, lambda own, past: layer(own, stream, past))

    def _take(self, state: Any, x: Tensor, key: Any) -> Tensor:
        before = self.axis.rank - 1

        def receive() -> list[Tensor]:
            if key not in self.taken:
                self.taken[key] = _receive_form(x.device, self.axis, before)
            return [_receive(each, x.device, self.axis, before) for each in self.taken[key] if each is not None]

        received = decide_once(receive)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the rank before waits for the gradient of its state
        x, *tensors = _Take.apply(x, self.axis, *received)
        for field, form in zip(fields(state), self.taken[key], strict=True):
            setattr(state, field.name, None if form is None else tensors.pop(0))
        return x

    def _hand(self, state: Any, y: Tensor, key: Any) -> Tensor:
        tensors = [getattr(state, field.name) for field in fields(state)]
        if key not in self.handed:
            self.handed[key] = _describe(tensors)
            _send_form(self.handed[key], y.device, self.axis, self.axis.rank + 1)
        return _Hand.apply(y, self.axis, *(each for each in tensors if each is not None))


def relays_of(make: ParameterFactory, model: ModelSection, kinds: Mapping[str, Kind | None]) -> dict[str, Relay]:
    """A relay for each of these kinds whose states the ranks of a sequence send on."""
    if make.context.size == 1:
        return {}
    states = (name for name, kind in kinds.items() if kind is not None and kind_of(model, kind).context == "states")
    return {name: Relay(make.mesh.context) for name in states}


def new_state(layer: nn.Module) -> Any:
    """The state of a layer before the first piece of a sequence. None if it has none."""
    make: Callable[[], Any] | None = getattr(layer, "new_state", None)
    return None if make is None else make()

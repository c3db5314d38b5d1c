"""Messages of layers on the tensor axis, in closed form, from declarations of the kinds.

A static method `sends(model, options, tensor)` of a kind gives the events of one forward pass, in order, as a list of
the classes below. `tensor` is the axis. This module derives their calls: passes, operations and sizes.

S bytes of an event in one micro-batch of T tokens, with `width` numbers per token of 4 bytes in fp32 and 2 otherwise:
    Enter   backward: all-reduce of T width (with sequence parallelism: forward all-gather, backward reduce-scatter)
    Leave   forward: all-reduce of T width (with sequence parallelism: reduce-scatter, backward all-gather)
    Summed  forward and backward: all-reduce of T width
    Shared  backward: all-reduce of the parameter's gradient, which does not depend on T
    Across  forward, backward or both: all-reduce of T width over the columns of a grid of ranks
With C columns, Enter and Leave are of the width / C, over the ranks of a column.
(Shoeybi et al. 2019, section 3, Korthikanti et al. 2022, section 4.2).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.config import Config
from megatron.config.arithmetic.recurrence import Passes, core_of
from megatron.config.pattern import BlockPattern, Kind
from megatron.config.sections.model import ModelSection, NormOptions
from megatron.config.variants import options_of
from megatron.objectives.named import objective_of
from megatron.parallel.messages.traffic import SIZES, Call, Messages
from megatron.parallel.transport.compression import part_message, sum_messages

from ..block import Block, opens_core, reads_stream, scales_input
from ..hyper_connections import sizes
from ..options import layer_class

ONCE = Passes(0, 1)


class NotPredicted(ValueError):
    """A configuration has a part whose messages have no formula."""


@dataclass(frozen=True)
class TensorAxis:
    """Number of tensor parallel ranks, whether the stream is cut along the sequence, form of activations in messages
    (`megatron.config.arithmetic.wire`), and ranks that share rows of matrices (`parallel.depth`). With columns
    (`parallel.columns`), these are the ranks of one column."""

    ranks: int = 1
    sequence: bool = False
    wire: str = "none"
    depth: int = 1
    columns: int = 1

    @property
    def grid(self) -> "TensorAxis":
        """All ranks of the grid, among which embedding and head share the vocabulary."""
        return replace(self, ranks=self.ranks * self.columns, columns=1)


@dataclass(frozen=True)
class Enter:
    """Into a tensor region."""

    width: int


@dataclass(frozen=True)
class Leave:
    """Out of a tensor region."""

    width: int


@dataclass(frozen=True)
class Summed:
    """A value that every rank uses after a sum. `wide` where it is fp32 in every precision."""

    width: int
    wide: bool = False
    again: bool = False  # it is made once more in the backward pass


@dataclass(frozen=True)
class Shared:
    """A replicated parameter, or n rows of a matrix. Each rank has part of its uses."""

    elements: int
    wide: bool = False
    rows: int = 0


@dataclass(frozen=True)
class Across:
    """A sum over columns: of partial products (forward), of a gradient (backward), or of what a norm needs (both)."""

    width: int
    forward: bool = True
    backward: bool = True
    wide: bool = False
    operation: str = "all_reduce"  # all_gather where the columns collect their parts of the width


Event = Enter | Leave | Summed | Shared | Across


def row_events(width: int, bias: bool, tensor: TensorAxis, inputs: int = 0) -> list[Event]:
    """A `RowLinear` that closes a region.

    Args:
        inputs: of the whole matrix, for kinds that go with columns.
    """
    across = [Across(inputs // tensor.ranks, forward=False)] if tensor.columns > 1 else []
    return [*across, Leave(width), *([Shared(width)] if bias and tensor.sequence else [])]


def column_events(tensor: TensorAxis, *outputs: int) -> list[Event]:
    """Each `ColumnLinear` with these outputs on this rank, of a kind that goes with columns."""
    return [Across(each, backward=False) for each in outputs] if tensor.columns > 1 else []


def gathered_gradients(tensor: TensorAxis, *widths: int) -> list[Event]:
    """Values of these widths on all ranks. The columns then take parts of them."""
    return [Across(each, forward=False, operation="all_gather") for each in widths] if tensor.columns > 1 else []


def stream_norm(options: NormOptions, size: int, tensor: TensorAxis) -> list[Event]:
    """A `Norm` of the residual stream."""
    sums = 0 if tensor.columns == 1 else 1 if options.type == "rmsnorm" else 2
    return [*norm(options, size, tensor.sequence), *[Across(1, wide=True)] * sums]


def whole_events(rows: int, columns: int, bias: bool = False) -> list[Event]:
    """A `ColumnLinear` that is not cut."""
    return [*([Shared(rows)] if bias else []), Shared(rows * columns, rows=rows)]


def norm(options: NormOptions, size: int, partial: bool = True) -> list[Event]:
    """A `Norm`."""
    vectors = {"layernorm": 2 if options.bias else 1, "rmsnorm": 1, "nonparametric": 0}[options.type]
    return [Shared(size)] * vectors if partial else []


@dataclass(frozen=True)
class CallRecorder:
    """Makes calls of events."""

    tensor: TensorAxis  # the axis
    tokens: int  # of a micro-batch
    dtype: str  # in which the layers compute

    def calls(self, layer: str, events: Iterable[Event], forward: str = "forward") -> Iterator[tuple[Call, int, int]]:
        """Calls of a forward pass, or of its repetition (`forward="recompute"`)."""
        return (entry for entry in self._forward(layer, events, forward) if entry[0].ranks > 1)

    def gradients(self, layer: str, events: Iterable[Event]) -> Iterator[tuple[Call, int, int]]:
        """Calls of the backward pass."""
        return (entry for entry in self._backward(layer, events) if entry[0].ranks > 1)

    def _forward(self, layer: str, events: Iterable[Event], forward: str) -> Iterator[tuple[Call, int, int]]:
        for event in events:
            if isinstance(event, Enter) and self.tensor.sequence:
                yield from self._door(forward, layer, "all_gather", event.width)
            elif isinstance(event, Leave):
                operation = "reduce_scatter" if self.tensor.sequence else "all_reduce"
                yield from self._door(forward, layer, operation, event.width)
            elif isinstance(event, Summed):
                yield self._call(forward, layer, "all_reduce", event.width, event.wide)
            elif isinstance(event, Across) and event.forward:
                yield self._across(forward, layer, event)

    def _backward(self, layer: str, events: Iterable[Event]) -> Iterator[tuple[Call, int, int]]:
        for event in events:
            if isinstance(event, Enter):
                operation = "reduce_scatter" if self.tensor.sequence else "all_reduce"
                yield from self._door("backward", layer, operation, event.width)
            elif isinstance(event, Leave) and self.tensor.sequence:
                yield from self._door("backward", layer, "all_gather", event.width)
            elif isinstance(event, Summed):
                for _ in range(2 if event.again else 1):
                    yield self._call("backward", layer, "all_reduce", event.width, event.wide)
            elif isinstance(event, Across) and event.backward:
                yield self._across("backward", layer, event)
            elif isinstance(event, Shared):
                dtype = "fp32" if event.wide else self.dtype
                call = Call("backward", layer, self._group, self.tensor.ranks, "all_reduce", dtype)
                runs = self.tensor.depth if event.rows and event.rows % self.tensor.depth == 0 else 1
                runs *= self.tensor.columns if event.rows else 1
                yield call, 1, event.elements // runs * SIZES[dtype]

    def _door(self, phase: str, layer: str, operation: str, width: int) -> Iterator[tuple[Call, int, int]]:
        """Into or out of a tensor region."""
        width //= self.tensor.columns
        wire, ranks, elements = self.tensor.wire, self.tensor.ranks, self.tokens * width
        if wire == "none":
            yield self._call(phase, layer, operation, width)
            return
        size, found = part_message(wire, elements, ranks), {"all_gather": ["all_gather"]}
        if operation == "all_reduce":
            size, _ = sum_messages(wire, elements, ranks)
            found["all_reduce"] = ["all_to_all", "all_gather"]
        for each in found.get(operation, ["all_to_all"]):
            yield Call(phase, layer, "tensor", ranks, each, "uint8"), 1, size

    def _call(self, phase: str, layer: str, operation: str, width: int, wide: bool = False) -> tuple[Call, int, int]:
        dtype = "fp32" if wide else self.dtype
        call = Call(phase, layer, self._group, self.tensor.ranks, operation, dtype)
        return call, 1, self.tokens * width * SIZES[dtype]

    @property
    def _group(self) -> str:
        return "rows" if self.tensor.columns > 1 else "tensor"

    def _across(self, phase: str, layer: str, event: Across) -> tuple[Call, int, int]:
        dtype, group = "fp32" if event.wide else self.dtype, "columns" if self.tensor.ranks > 1 else "tensor"
        call = Call(phase, layer, group, self.tensor.columns, event.operation, dtype)
        return call, 1, self.tokens * event.width * SIZES[dtype]

    def channels(self, phase: str, layer: str, width: int) -> Iterator[tuple[Call, int, int]]:
        """All channels of the stream on every column, which the embedding's gradient and the head need."""
        if self.tensor.columns > 1:
            yield self._across(phase, layer, Across(width, operation="all_gather"))


def tensor_traffic(config: Config, layers: Sequence[int], tensor: TensorAxis, core: Passes = ONCE) -> Messages:
    """Messages of one micro-batch on the tensor axis.

    Args:
        config: resolved.
        layers: places in the list [embedding, blocks..., head] that a rank holds.
        core: passes through a recurrent core.

    Raises:
        NotPredicted: a kind does not declare its messages.
    """
    tally = Messages()
    if tensor.grid.ranks == 1:
        return tally
    model, chunks, passes = config.model, config.training.sequence_chunks, _chunk(config, tensor)
    for place in [place for place in layers for _ in range(chunks)]:
        if place == 0:
            _all(tally, replace(passes, tensor=tensor.grid), "embedding", [Leave(model.hidden_size)])
            _all(tally, passes, "embedding", _embedding(model, tensor)[1:])
            _repeat(tally, passes.channels("backward", "embedding", model.hidden_size), 1)
        elif place == len(model.blocks) + 1:
            _head(tally, passes, config)
        else:
            often = core if place - 1 in core_of(model.blocks) else ONCE
            _block(tally, passes, config, place - 1, often)
    inside = core_of(model.blocks)
    if inside and inside.start + 1 in layers and model.recurrence.norm == "head":
        _all(tally, passes, "", norm(model.norm, model.hidden_size, tensor.sequence))
    return tally


def reading_traffic(config: Config, tensor: TensorAxis) -> Messages:
    """As `tensor_traffic`, of a teacher, which gives only the input of its head and whose layers no account names."""
    tally, model = Messages(), config.model
    if tensor.ranks == 1:
        return tally
    events, inside = _embedding(model, tensor), core_of(model.blocks)
    for index, pattern in enumerate(model.blocks):
        once = [event for _, each in block_sends(model, pattern, tensor, index) for event in each]
        events += once * (model.recurrence.evaluation if index in inside else 1)
    for _ in range(config.training.sequence_chunks):
        for entry in _chunk(config, tensor).calls("", [*events, Enter(model.hidden_size)]):
            tally.add(*entry)
    return tally


def _chunk(config: Config, tensor: TensorAxis) -> CallRecorder:
    """Each chunk of a sequence goes through a layer by itself."""
    training = config.training
    length = training.sequence_length // config.parallel.context // training.sequence_chunks
    return CallRecorder(tensor, training.micro_batch_size * length, config.precision.compute)


def _all(tally: Messages, passes: CallRecorder, layer: str, events: list[Event], often: Passes = ONCE) -> None:
    _repeat(tally, passes.calls(layer, events), often.total)
    _repeat(tally, passes.gradients(layer, events), often.backward)


def _repeat(tally: Messages, entries: Iterable[tuple[Call, int, int]], times: float) -> None:
    for call, messages, size in entries:
        tally.add(call, messages * int(times), size * int(times))


def _head(tally: Messages, passes: CallRecorder, config: Config) -> None:
    """The head, with the modules that predict further tokens. Its inputs for all of them are one message."""
    model, tensor = config.model, passes.tensor
    H, times = model.hidden_size, 1 + len(model.further_blocks)
    normed = norm(model.norm, H, tensor.sequence)
    joined = [Leave(H), *normed, *normed, Enter(2 * H), Leave(H), *normed]
    for index in range(len(model.blocks), len(model.blocks) + times - 1):
        _all(tally, passes, "head", joined)
        _block(tally, passes, config, index)
    if tensor.columns > 1:
        _all(tally, passes, "head", stream_norm(model.norm, H, tensor))
        _repeat(tally, passes.channels("forward", "head", H), 1)
        passes, normed = replace(passes, tensor=tensor.grid), []
    _all(tally, passes, "head", [*normed, Enter(times * H)])
    _loss(tally, passes, config, times)
    if config.training.sequence_chunks > 1:  # recomputed by a function of the head, which no account can name
        for entry in passes.calls("", [Enter(times * H)], "backward"):
            tally.add(*entry)
        _loss(tally, passes, config, times, ("backward", ""))


def _embedding(model: ModelSection, tensor: TensorAxis) -> list[Event]:
    H, cut = model.hidden_size, tensor.sequence
    events: list[Event] = [Leave(H)]
    if model.embedding.position == "learned" and cut:
        events.append(Shared(model.embedding.max_positions * H))
    if model.embedding.norm:
        events += stream_norm(model.norm, H, tensor)
    return events + ([Shared(2 * H)] if model.residual.channel_scales and cut else [])


def _loss(
    tally: Messages, passes: CallRecorder, config: Config, times: int, at: tuple[str, str] = ("forward", "head")
) -> None:
    """Each chunk of logits, of `times` the tokens, in fp32 per token: the largest, then two sums. With a teacher the
    largest of both, then five sums."""
    tokens, widths = times * passes.tokens, (1, 2) if objective_of(config).teacher is None else (2, 5)
    call = Call(*at, "tensor", passes.tensor.ranks, "all_reduce", "fp32")
    step = config.training.tokens_of_loss(config.model.vocab_size) or tokens
    for chunks, size in ((tokens // step, step), (1, tokens % step)):
        for width in widths if size else ():
            tally.add(call, chunks, chunks * width * size * SIZES["fp32"])


def block_sends(
    model: ModelSection, pattern: BlockPattern, tensor: TensorAxis, index: int
) -> list[tuple[str, list[Event]]]:
    """Events of a block in one forward pass, in order: (part, events). The part is a kind, or empty for the rest.

    Raises:
        NotPredicted: a kind does not declare its messages.
    """
    H, cut = model.hidden_size, tensor.sequence
    found: list[tuple[str, list[Event]]] = [("injection", [Enter(2 * H), Leave(H)])] if opens_core(model, index) else []
    found += [("", _layer(model, kind, tensor, index)) for kind in pattern.side]
    shared = Block.shares_norm(model, pattern)
    for branch in (pattern.mixers, (pattern.ffn,) if pattern.ffn else ()):
        if not branch:
            continue
        norms = stream_norm(model.norm, H, tensor) if not (shared and branch[0] is pattern.ffn) else []
        if branch[0] is pattern.ffn and scales_input(model, pattern):
            norms = [each for each in norms if not isinstance(each, Shared)]
        after = stream_norm(model.norm, H, tensor) if model.residual.norm in ("both", "sandwich") else []
        scales = [Shared(4 * H)] if model.residual.channel_scales and cut else []
        if model.residual.streams > 1 and cut:
            scales += [Shared(size, wide=True) for size in sizes(model, joins=True)]
        own = [(kind.name, _layer(model, kind, tensor, index)) for kind in branch]
        found += [("", norms), *own, ("", [*after, *scales])]
    if P := model.residual.token_inputs:
        weights = 3 * [Shared(H * P)] if cut else []
        found.append(("inputs", [Leave(P), *norm(model.norm, P, cut), *norm(model.norm, H, cut), *weights]))
    if model.residual.streams > 1 and cut and index == len(model.blocks) - 1:
        found.append(("", [Shared(size, wide=True) for size in sizes(model, joins=False)]))
    return found


def _layer(model: ModelSection, kind: Kind, tensor: TensorAxis, index: int) -> list[Event]:
    layer = layer_class(model, kind)
    if not hasattr(layer, "sends"):
        raise NotPredicted(f"layers of kind {kind.name} do not say what they send (`sends`)")
    place = (index,) if getattr(layer, "indexed", False) else ()
    return layer.sends(model, options_of(model, kind), tensor, *place)


def _block(tally: Messages, passes: CallRecorder, config: Config, index: int, often: Passes = ONCE) -> None:
    model, recompute = config.model, config.training.activation_checkpointing
    pattern, name = (*model.blocks, *model.further_blocks)[index], f"layers.{index}"
    parts = block_sends(model, pattern, passes.tensor, index)
    for part, events in parts:
        _all(tally, passes, f"{name}.{part}" if part else name, events, often)
    left = recompute.mode == "none" or (recompute.mode == "full" and index % recompute.every)
    if left and config.training.sequence_chunks == 1:
        return
    for part, events in _repeated(model, pattern, parts):
        at = (f"{name}.{part}", "recompute") if part else ("", "backward")  # no account can name a function of a block
        _repeat(tally, passes.calls(at[0], events, at[1]), often.backward)


def stops_early(model: ModelSection, pattern: BlockPattern) -> bool:
    """Whether a block's repetition ends with its last layer's last matrix product.

    Where that layer's sum is only added to the stream, the backward pass needs no later tensor, and not the sum."""
    kind = pattern.layers[-1]
    layer, residual = layer_class(model, kind), model.residual
    normed = residual.norm in ("both", "sandwich") or reads_stream(model, pattern)
    needed = getattr(layer, "needs_output", lambda model, options: False)(model, options_of(model, kind))
    several = residual.streams > 1 or residual.token_inputs > 0
    return not (normed or residual.channel_scales or several or model.dropout > 0.0 or needed)


def _repeated(
    model: ModelSection, pattern: BlockPattern, parts: list[tuple[str, list[Event]]]
) -> list[tuple[str, list[Event]]]:
    """Events of a repetition, up to the last tensor that the backward pass needs."""
    if not stops_early(model, pattern):
        return parts
    last = max(place for place, (part, _) in enumerate(parts) if part)
    kept = parts[last][1]
    place = max(at for at, event in enumerate(kept) if isinstance(event, Leave))
    after = [event for event in kept[place + 1 :] if not isinstance(event, Across)]
    return [*parts[:last], (parts[last][0], [*kept[:place], *after])]

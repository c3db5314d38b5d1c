"""One layer of the stack: mixers, a feed-forward network, or both, added to the residual stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.config.arithmetic.recurrence import core_of
from megatron.config.pattern import BlockPattern, Kind, call_numbers
from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of
from megatron.parallel.layers.collectives import enter
from megatron.parallel.layers.linear import RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.shard import Role, Shard

from .counts import Counts
from .hyper_connections import ROWS, HyperConnection, connection_counts, joined, rows_of, with_rows
from .initialisation import Initialisation
from .norm import Norm, norm_activations, norm_parameters
from .options import kind_of, layer_class
from .relay import Relay, new_state, relays_of
from .residual import ChannelScale, Dropout, residual_merge
from .stream import INJECTED, Channel, Stream, apply_layer
from .token_inputs import TokenInputs, input_channels, input_counts


class SideBySide(nn.ModuleDict):
    """x [B, s, H] to the sum of its layers' outputs [B, s, H], and the channels that they write, if any.

    Each layer (`attention&mamba2`, Falcon-H1, Zuo et al. 2025) is what it would be by itself: its options say what it
    multiplies its input and its output by.

    Args:
        layers: by the names of their kinds, in the pattern's order.
        relays: of those layers whose states ranks hand on, by the same names.
    """

    def __init__(self, layers: dict[str, nn.Module], relays: dict[str, Relay]) -> None:
        super().__init__(layers)
        self.relays = relays

    def forward(
        self, x: Tensor, stream: Stream, states: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, written = [], {}
        for name, layer in self.items():
            y, own = apply_layer(layer, x, stream, states and states[name], self.relays.get(name))
            outputs.append(y)
            written.update(own)
        return sum(outputs[1:], outputs[0]), written

    def new_state(self) -> dict[str, Any]:
        """The state of each layer between pieces of a sequence."""
        return {name: new_state(layer) for name, layer in self.items()}

    def prepare(self, stream: Stream) -> None:
        """See `Attention.prepare`."""
        for layer in self.values():
            cast(Any, layer).prepare(stream)


class Injection(nn.Module):
    """W [s, e]: state and output of the prelude, [B, s, H] each, to the input of the core. W is cut by columns."""

    def __init__(self, make: ParameterFactory, model: ModelSection, init: Initialisation):
        super().__init__()
        H = model.hidden_size
        self.mesh, self.dtype = make.mesh, make.dtype
        (self.span,) = Shard(1).spans(2 * H, make.mesh.tensor.rank, make.mesh.tensor.size)
        self.mix = RowLinear(make, 2 * H, H, init=init.hidden(2 * H, H), role=Role.HIDDEN)

    def forward(self, stream: Stream) -> Stream:
        both = torch.cat([stream.hidden, stream.channels[INJECTED]], -1).to(self.dtype)
        mine = enter(both, self.mesh)[..., self.span.start : self.span.stop]
        return stream.with_hidden(self.mix(mine).to(stream.hidden.dtype))


def injection_counts(model: ModelSection) -> Counts:
    """Costs of one pass. Its two inputs are kept as one tensor."""
    H = model.hidden_size
    return Counts(parameters=2 * H * H, flops=4 * H * H, activations=2 * H, products=H)


@dataclass
class BlockState:
    """Decoding state of one block: of its mixers, its ffn and the side layers."""

    mixer: Any = None
    ffn: Any = None
    side: tuple[Any, ...] = ()


class Block(nn.Module):
    """Stream to stream. See `ResidualOptions` for the forms.

    Logical names: `layers.<index>.{mixer_norm, ffn_norm, <kind of a mixer>, <kind of ffn>, <kind beside the mixer>}`,
    `{mixer_output_norm, ffn_output_norm}` with norms on both sides, and `{mixer_joint, ffn_joint}` with
    `channel_scales`, `{mixer_rows, ffn_rows}` with several rows, and `rows` in the last block. `injection` in the first
    block of a recurrent core. `scale` with `block_scale`. `inputs` with `token_inputs`.

    Args:
        shared: modules that blocks of this rank share, by logical name. Blocks add missing modules.
    """

    def __init__(
        self,
        make: ParameterFactory,
        model: ModelSection,
        pattern: BlockPattern,
        init: Initialisation,
        shared: dict[str, nn.Module] | None = None,
    ):
        super().__init__()
        self.residual, self.pattern, self.dtype, self.index = model.residual, pattern, make.dtype, init.index
        self.multiplier = model.residual.multiplier * init.factors.branch
        self.post_norm = reads_stream(model, pattern)
        self.sandwich = model.residual.norm == "sandwich"
        partial, normed_after = make.mesh.layout.sequence, model.residual.norm in ("both", "sandwich")
        self.injection: Injection | None = None
        if opens_core(model, init.index):
            self.injection = Injection(make.scope("injection"), model, init)
        self.scale = make.buffer("scale", (1,), role=Role.NORM).fill_(1.0) if model.residual.block_scale else None
        self.mixer: nn.Module | None = None
        self.ffn: nn.Module | None = None
        self.side_layers: nn.ModuleList | None = None
        self.mixer_norm: Norm | None = None
        self.ffn_norm: Norm | None = None
        self.mixer_output_norm: Norm | None = None
        self.ffn_output_norm: Norm | None = None
        self.mixer_joint: ChannelScale | None = None
        self.ffn_joint: ChannelScale | None = None

        def norm(name: str, weighted: bool = True) -> Norm:
            return Norm(make.scope(name), model.hidden_size, model.norm, partial=partial, weighted=weighted)

        if pattern.mixer:
            self.mixer_norm, self.mixer = norm("mixer_norm"), _mixer(make, model, pattern, init)
            self.mixer_output_norm = norm("mixer_output_norm") if normed_after else None
        shared = {} if shared is None else shared
        if pattern.side:
            self.side_layers = nn.ModuleList(
                layer_class(model, kind)(
                    make.scope(str(kind).replace("@", ".")), model, kind, options_of(model, kind), init, number, shared
                )
                for kind, number in zip(pattern.side, call_numbers(model.blocks)[init.index])
            )
        if pattern.ffn:
            self.ffn_norm = (
                None if self.shares_norm(model, pattern) else norm("ffn_norm", not scales_input(model, pattern))
            )
            self.ffn = _layer(make, model, pattern.ffn, init)
            self.ffn_output_norm = norm("ffn_output_norm") if normed_after else None
        self.inputs: TokenInputs | None = None
        if model.residual.token_inputs:
            self.inputs = TokenInputs(make.scope("inputs"), model, init, shared)
        if model.residual.channel_scales:
            self.mixer_joint = residual_merge(make.scope("mixer_joint"), model.hidden_size) if pattern.mixer else None
            self.ffn_joint = residual_merge(make.scope("ffn_joint"), model.hidden_size) if pattern.ffn else None
        self.connections: nn.ModuleDict | None = None
        self.collapse: HyperConnection | None = None
        if model.residual.streams > 1:
            self._connect(make, model, init)
        alone = pattern.mixer if len(pattern.mixers) == 1 else None
        self.relays = relays_of(make, model, {"mixer": alone, "ffn": pattern.ffn})
        self.mixer_dropout = Dropout(make, model, "mixer") if model.dropout > 0.0 else None
        self.ffn_dropout = Dropout(make, model, "ffn") if model.dropout > 0.0 else None

    def _connect(self, make: ParameterFactory, model: ModelSection, init: Initialisation) -> None:
        """Connections of a stream of several rows, one for each branch, and in the last block one for the head."""
        branches = {"mixer": self.pattern.mixer, "ffn": self.pattern.ffn}
        self.connections = nn.ModuleDict({
            name: HyperConnection(make.scope(f"{name}_rows"), model, init) for name, kind in branches.items() if kind
        })
        if init.index == len(model.blocks) - 1:
            self.collapse = HyperConnection(make.scope("rows"), model, init, joins=False)

    def layers(self) -> Iterator[tuple[Kind, nn.Module]]:
        """Its mixers and its feed-forward, each with its kind."""
        if self.mixer is not None:
            mixers = self.mixer.values() if isinstance(self.mixer, SideBySide) else (self.mixer,)
            yield from zip(self.pattern.mixers, mixers)
        if self.pattern.ffn is not None and self.ffn is not None:
            yield self.pattern.ffn, self.ffn

    def turning(self) -> Iterator[tuple[Kind, nn.Module]]:
        """All layers that positions may turn, also side layers, each with its kind."""
        yield from self.layers()
        yield from zip(self.pattern.side, self.side_layers or ())

    @staticmethod
    def shares_norm(model: ModelSection, pattern: BlockPattern) -> bool:
        residual, both = model.residual, pattern.mixer is not None and pattern.ffn is not None
        return residual.form == "parallel" and residual.shared_norm and both and not pattern.side

    def forward(self, stream: Stream, state: BlockState | None = None) -> Stream:
        return self.scaled(self._branched(stream, state))

    def scaled(self, stream: Stream) -> Stream:
        """The stream that leaves the block, from the one with its branches."""
        if self.inputs is not None:
            stream = stream.with_hidden(stream.hidden + self.inputs(stream.hidden, stream) * self.multiplier)
        if self.scale is None:
            return stream
        return stream.with_hidden(stream.hidden * self.scale.to(stream.hidden.dtype))

    def _branched(self, stream: Stream, state: BlockState | None) -> Stream:
        """The stream with the branches added."""
        stream = stream if self.injection is None else self.injection(stream)
        x, state = stream.hidden, state or BlockState()
        if self.connections is not None:
            return self._connected(stream, state)
        if self.residual.form == "parallel" and self.mixer is not None and self.ffn is not None:
            shared = _normed(self.mixer_norm, x) if self.ffn_norm is None else None
            mixed, stream = self._mix(x, stream, state, shared)
            fed, stream = self._branch("ffn", x, stream, state, shared)
            return stream.with_hidden(x + mixed + fed)
        if self.mixer is not None:
            x, stream = self.mixed(x, stream, state)
        if self.ffn is not None:
            x, stream = self.fed(x, stream, state)
        return stream.with_hidden(x)

    def _connected(self, stream: Stream, state: BlockState) -> Stream:
        """A stream of several rows. The last block leaves what the head reads."""
        rows = rows_of(stream, self.residual.streams)
        for name, connection in cast(nn.ModuleDict, self.connections).items():
            x, *weights = connection(rows)
            y, stream = self._branch(name, x, stream, state)
            rows = joined(y, rows, *weights)
        return with_rows(stream, rows) if self.collapse is None else stream.with_hidden(self.collapse(rows)[0])

    def mixed(self, x: Tensor, stream: Stream, state: BlockState) -> tuple[Tensor, Stream]:
        """x plus the mixer's branch, and the stream with its channels."""
        x, normed = self._started(x, self.mixer_norm)
        y, stream = self._mix(x, stream, state, normed)
        return self._joined(y, x, self.mixer_joint, self.mixer_output_norm), stream

    def fed(self, x: Tensor, stream: Stream, state: BlockState) -> tuple[Tensor, Stream]:
        """x plus the ffn's branch, and the stream with its channels."""
        x, normed = self._started(x, self.ffn_norm)
        y, stream = self._branch("ffn", x, stream, state, normed)
        return self._joined(y, x, self.ffn_joint, self.ffn_output_norm), stream

    def _started(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
        """The stream that a branch is added to, and the branch's input if the stream is made of it."""
        if self.residual.norm != "deepnorm":
            return x, None
        normed = _normed(norm, x)
        return (normed * self.residual.stream_multiplier).to(x.dtype), normed

    def _joined(self, y: Tensor, x: Tensor, joint: ChannelScale | None, norm: Norm | None) -> Tensor:
        """The stream with a branch's output."""
        x = x + y if joint is None else joint(y, x)
        return _normed(norm, x).to(x.dtype) if self.sandwich else x

    def new_state(self) -> BlockState:
        """Empty decoding state, from the `new_state` of the layers that have one."""
        mixer, ffn, *side = map(new_state, (self.mixer, self.ffn, *(self.side_layers or ())))
        return BlockState(mixer, ffn, tuple(side))

    def _mix(self, x: Tensor, stream: Stream, state: BlockState, normed: Tensor | None = None) -> tuple[Tensor, Stream]:
        """The mixer's branch, after the side layers, and the stream with its channels."""
        for layer, own in zip(self.side_layers or (), state.side or (None,) * len(self.side_layers or ())):
            x = x + layer(stream.hidden, stream, own)
        return self._branch("mixer", x, stream, state, normed)

    def _branch(
        self, name: str, x: Tensor, stream: Stream, state: BlockState, normed: Tensor | None = None
    ) -> tuple[Tensor, Stream]:
        """The branch of the mixer or the ffn, and the stream with its channels.

        Args:
            normed: its input, where both branches share a norm.
        """
        layer, norm, output_norm, dropout = (
            getattr(self, name + part) for part in ("", "_norm", "_output_norm", "_dropout")
        )
        own, relay = getattr(state, name), self.relays.get(name)
        if self.post_norm:
            y, written = apply_layer(layer, x.to(self.dtype), stream, own, relay)
            y = _normed(norm, y)
        else:
            y, written = apply_layer(layer, _normed(norm, x) if normed is None else normed, stream, own, relay)
        stream = stream.with_channels(written) if written else stream
        if output_norm is not None and not self.sandwich:
            y = output_norm(y)
        if dropout is not None:
            y = dropout(y, stream)
        return (y if self.multiplier == 1.0 else y * self.multiplier), stream


def scales_input(model: ModelSection, pattern: BlockPattern) -> bool:
    """Whether the feed-forward has the weights of the norm before it."""
    return pattern.ffn is not None and kind_of(model, pattern.ffn).scales_input(options_of(model, pattern.ffn))


def opens_core(model: ModelSection, index: int) -> bool:
    """Whether the block of this index is the first of a recurrent core."""
    core = core_of(model.blocks)
    return bool(core) and index == core.start


def hands_on_states(module: nn.Module) -> bool:
    """Whether a layer of the module waits for a state from another rank, and that one for its gradient."""
    return any(isinstance(each, (Block, SideBySide)) and each.relays for each in module.modules())


def reads_stream(model: ModelSection, pattern: BlockPattern) -> bool:
    """Whether the block's layers read the stream itself, with norms after the layers."""
    attends = bool(pattern.mixers) and all(kind_of(model, kind).attends for kind in pattern.mixers)
    return model.residual.norm == "post" or (model.residual.norm == "hybrid" and attends)


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    assert norm is not None  # a part of a block has one, of its own or shared
    return norm(x)


def _layer(make: ParameterFactory, model: ModelSection, kind: Kind, init: Initialisation) -> nn.Module:
    return layer_class(model, kind)(make.scope(kind.name), model, options_of(model, kind), init)


def _mixer(make: ParameterFactory, model: ModelSection, pattern: BlockPattern, init: Initialisation) -> nn.Module:
    layers = {kind.name: _layer(make, model, kind, init) for kind in pattern.mixers}
    if len(layers) == 1:
        return layers[pattern.mixers[0].name]
    return SideBySide(layers, relays_of(make, model, {kind.name: kind for kind in pattern.mixers}))


def block_channels(model: ModelSection, pattern: BlockPattern, ranks: int, index: int) -> dict[str, Channel]:
    """The side channels that the block of this index reads or makes, on one of `ranks` tensor parallel ranks.

    A kind with channels has a static method `channels(model, options, ranks)`, or `channels_at(model, ranks, index)`
    where they differ by block. A layer that makes one returns `(output, {name: value})`."""
    found = input_channels(model) if model.residual.token_inputs else {}
    for kind in pattern.kinds:
        layer = layer_class(model, kind)
        if hasattr(layer, "channels"):
            found |= layer.channels(model, options_of(model, kind), ranks)
        if hasattr(layer, "channels_at"):
            found |= layer.channels_at(model, ranks, index)
    rows = model.residual.streams - 1
    return found | ({ROWS: Channel(rows * model.hidden_size)} if rows else {})


def streams_saved(model: ModelSection, pattern: BlockPattern) -> int:
    """Number of states of the residual stream that a block keeps for its backward pass: the inputs of its norms."""
    if reads_stream(model, pattern):
        return 0  # its layers read the stream, in their own type
    branches = sum(kind is not None for kind in (pattern.mixer, pattern.ffn))
    side = 2 * len(pattern.side)  # these read the embedding too
    return side + (1 if model.residual.form == "parallel" else branches)


def _inputs(options: Sequence[Any]) -> int:
    """Number of different tensors that layers with these options read, where all get the same."""
    changed = [getattr(each, "input_multiplier", 1.0) != 1.0 for each in options]
    return sum(changed) + (not all(changed))


def block_counts(model: ModelSection, pattern: BlockPattern, sequence_length: int, index: int = 0) -> Counts:
    """Costs of the block of this index, with its norms. Kinds whose costs depend on the index are `indexed`."""
    H, total, norms = model.hidden_size, Counts(), 0
    for kind in pattern.layers:
        layer = layer_class(model, kind)
        place = (index,) if getattr(layer, "indexed", False) else ()
        total += layer.counts(model, options_of(model, kind), sequence_length, *place)
    for branch in (pattern.mixers, (pattern.ffn,) if pattern.ffn else ()):
        if branch:
            # inputs of its layers, or their outputs before a post norm
            total += Counts(activations=H * _inputs([options_of(model, kind) for kind in branch]))
            total += Counts(activations=H if model.dropout > 0.0 else 0)
            norms += 1
    for number, kind in enumerate(pattern.side):
        call = call_numbers(model.blocks)[index][number]
        total += layer_class(model, kind).counts(model, options_of(model, kind), sequence_length, call)
    if model.residual.streams > 1:
        total += connection_counts(model, norms, index == len(model.blocks) - 1)
    if model.residual.channel_scales:
        total += Counts(norms * 4 * H, activations=norms * H)  # the branch's output. A norm keeps the stream
    if opens_core(model, index):
        total += injection_counts(model)
    if model.residual.token_inputs:
        total += input_counts(model, index)
    if model.residual.norm in ("both", "sandwich"):  # each branch's output, or the sum, with its own scale
        total += Counts(norms * norm_parameters(model.norm, H), activations=norms * norm_activations(model.norm, H))
    if Block.shares_norm(model, pattern):
        norms = 1
        total += Counts(activations=-H)  # both layers read the same
    total += Counts(norms * norm_parameters(model.norm, H), activations=norms * norm_activations(model.norm, H))
    if scales_input(model, pattern):
        total += Counts(-norm_parameters(model.norm, H))
    if model.residual.form == "parallel" and norms == 2:
        total += Counts(activations=-H)  # both norms (post norm: both layers) read the same
    return total

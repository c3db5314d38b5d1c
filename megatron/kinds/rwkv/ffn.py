"""The channel mix of RWKV-4 to RWKV-7, cut over tensor parallel ranks by its width.

value(relu(key x_k)^2), in RWKV-4 to 6 times sigmoid(receptance x_r). x_k and x_r mix each token with the one before."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.sequence_scan import document_begins, token_before
from megatron.kinds.rwkv.options import RWKV4FFNOptions, RWKV5FFNOptions
from megatron.kinds.rwkv.parts import ShiftState, Start, mixed
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Across, Enter, Event, Shared, TensorAxis, column_events, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, gather_channels, sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory, logical_of, shard_index
from megatron.parallel.layout.initial import Init
from megatron.parallel.layout.shard import Role

Options = RWKV4FFNOptions | RWKV5FFNOptions


class ChannelMix(nn.Module):
    """x [B, s, H] to its output [B, s, H]. The four kinds differ in what follows.

    Attributes:
        gated: whether there is a receptance.
        of_token: the mixes are shares of the token itself (RWKV-4 and 5), not of the one before.
        key_gain: of the orthogonal matrix that `key` starts as.
    """

    gated, of_token, key_gain = True, False, 1.0
    compiled_parts = ("mixed", "activated")
    mixed = staticmethod(mixed)

    new_state = ShiftState

    def __init__(self, make: ParameterFactory, model: ModelSection, options: Options, init: Initialisation):
        super().__init__()
        self.mesh, self.context, H, width = make.mesh, make.context, model.hidden_size, options.hidden_size
        start = Start(options.init, init, H)
        self.mix = make.parameter("mix", (2 if self.gated else 1, H), role=Role.STATE, init=self.mixes(start), stream=1)
        self.key = ColumnLinear(make.scope("key"), H, (width,), init=start.reads(H, width, self.key_gain, 0.5))
        self.value = RowLinear(make.scope("value"), width, H, init=start.writes(width, H))
        self.receptance = None
        if self.gated:
            # Cut by inputs, so that its sums over the ranks have the stream's own form. Columns gather their channels.
            self.receptance = RowLinear(make.scope("receptance"), H, H, init=start.writes(H, H), role=Role.HIDDEN)

    def forward(self, x: Tensor, stream: Stream, state: ShiftState | None = None) -> Tensor:
        x_BSH, starts, past = enter(x, self.mesh), document_begins(stream, state, self.context), state or ShiftState()
        last = token_before(self.context, x_BSH, past.last)
        mix = sum_gradient(self.mix, self.mesh.tensor)
        parts = self.mixed(x_BSH, 1 - mix if self.of_token else mix, last, starts)
        if state is not None:
            state.keep(self.context, x_BSH, stream)
        y = self.value(self.activated(self.key(parts[0])))
        if self.receptance is None:
            return y
        (own,) = logical_of(self.receptance.weight).spans(*shard_index(self.receptance.weight))[1]
        whole = gather_channels(parts[1], self.mesh.columns)
        return torch.sigmoid(self.receptance(whole.narrow(-1, own.start, own.length))) * y

    @staticmethod
    def activated(h: Tensor) -> Tensor:
        return F.relu(h).square()

    @classmethod
    def mixes(cls, start: Start) -> Init:
        return start.mixes(*[start.rest] * 2)

    @classmethod
    def sends(cls, model: ModelSection, options: Options, tensor: TensorAxis) -> list[Event]:
        H = model.hidden_size
        products = column_events(tensor, options.hidden_size // tensor.ranks)
        own = [*products, *row_events(H, False, tensor, options.hidden_size)]
        if cls.gated:
            gathered = [Across(H, backward=False, operation="all_gather")] if tensor.columns > 1 else []
            own += [*gathered, *row_events(H, False, tensor, H)]
        return [Enter(H), Shared((2 if cls.gated else 1) * H // tensor.columns), *own]

    @classmethod
    def needs_output(cls, model: ModelSection, options: Options) -> bool:
        """Whether the backward pass needs the sum over the ranks: that of receptance times value does."""
        return cls.gated

    @classmethod
    def exchanges(cls, model: ModelSection, options: Options, around: Around) -> list[LayerMessage]:
        return scan_messages(around, model.hidden_size)

    @classmethod
    def counts(cls, model: ModelSection, options: Options, sequence_length: int) -> Counts:
        H, width = model.hidden_size, options.hidden_size
        matrices = 2 * H * width + (H * H if cls.gated else 0)
        mixes = 2 if cls.gated else 1
        return Counts(
            parameters=matrices + mixes * H,
            flops=2 * matrices,
            activations=mixes * H + 2 * width + (2 * H if cls.gated else 0),  # relu, its square, both factors
            products=width + mixes * H,
            state=H,
        )


class RWKV4ChannelMix(ChannelMix):
    """Peng et al. 2023."""

    of_token, key_gain = True, 2.0

    @classmethod
    def mixes(cls, start: Start) -> Init:
        return start.shares(*[start.rest] * 2)


class RWKV5ChannelMix(RWKV4ChannelMix):
    """Peng et al. 2024 (Eagle)."""

    key_gain = 1.0


class RWKV6ChannelMix(ChannelMix):
    """Peng et al. 2024 (Finch)."""


class RWKV7ChannelMix(ChannelMix):
    """Peng et al. 2025."""

    gated = False
    compiles = True  # with a mixer that does

    @classmethod
    def mixes(cls, start: Start) -> Init:
        return start.mixes(start.rest**4)

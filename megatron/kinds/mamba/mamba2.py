"""Mamba-2 (Dao and Gu 2024), cut over tensor parallel ranks by heads.

Shapes: B samples, S positions, H hidden, h heads of P channels (d = h P), G groups, N state elements, heads of this
rank unless said otherwise."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.activations import scaled
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.convolution import CONVOLUTIONS, Taps, in_graph
from megatron.kinds.common.recurrence.operations import compiles
from megatron.kinds.common.recurrence.recomputed import recomputed, recomputed_in_graph
from megatron.kinds.mamba.options import MAMBA2, Mamba2Options, inner_channels
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.kernels.choice import choose_kernels
from megatron.model.norm import rms_norm
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, sum_over
from megatron.parallel.layers.linear import ColumnLinear, RowLinear, joined
from megatron.parallel.layers.over_tokens import over_tokens
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, Init, time_steps
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard

from ...model.costs.traffic import Enter, Event, Shared, Summed, TensorAxis, column_events, row_events, whole_events
from ..common.recurrence.sequence_scan import carried_by_decay, document_begins, last_document, taps_after, taps_before
from . import simple_gla
from .ssd import SCANS, ends, gated_output, gated_rows


@dataclass
class Mamba2State:
    """State between pieces of a sequence. Gradients may flow through it."""

    x: Tensor | None = None  # x, bc: the last K - 1 inputs of the convolutions, [B, K - 1, channels]
    bc: Tensor | None = None
    memory: Tensor | None = None  # [B, h, P, N], fp32
    document: Tensor | None = None  # int [B], document of the last token, where there are documents


class Mamba2(nn.Module):
    """x [B, s, H] to its output [B, s, H]: output(norm(ssd(silu(conv([x B C]))) * silu(z))), and multipliers.

    Groups are cut over the ranks if their number allows. Otherwise every rank computes B and C of all groups and uses
    the groups of its heads.

    Columns cut only the matrices that read or write the stream. Projected channels are summed over columns, so each
    has all heads of its row and scans them again. Convolutions, `A_log`, `D`, `dt_bias` and the gated norm are whole
    over columns. To cut the heads over columns would send as much, and the grid would have to divide them."""

    compiled_parts: tuple[str, ...] = ("_gated", "prepared", "scanned")
    # See `finished` in engine/deepspeed/buckets.py.
    uses = ("zx", "bc", "dt", "x_conv.bias", "x_conv.weight", "bc_conv.bias", "bc_conv.weight", "A_log", "dt_bias", "D",
            "norm", "output")  # fmt: skip

    new_state = Mamba2State

    def __init__(self, make: ParameterFactory, model: ModelSection, options: Mamba2Options, init: Initialisation):
        super().__init__()
        mesh, H, ranks = make.mesh, model.hidden_size, make.mesh.tensor.size
        self.mesh, self.context, self.options, self.epsilon = mesh, make.context, options, model.norm.epsilon
        self.kernels = choose_kernels(model.kernels, MAMBA2, make.device)[0]
        self.compiles = self.kernels == "fla" and make.dtype != torch.float32 and compiles()
        self.prepared, self.scanned = gated_rows, gated_output
        inner = inner_channels(options, H)
        heads, read = inner // options.head_dim, options.groups * options.state_size
        self.heads, self.channels = heads // ranks, inner // heads * (heads // ranks)
        first = self.heads * mesh.tensor.rank
        self.shard_groups = options.groups % ranks == 0
        if not self.shard_groups:
            self.compiled_parts = ()  # its norm adds up over the ranks
        self.group_of_head = [(first + head) * options.groups // heads for head in range(self.heads)]
        self.zx = ColumnLinear(make.scope("zx"), H, (inner, inner), init=init.hidden(H, inner), bias=options.bias)
        self.bc = ColumnLinear(
            make.scope("bc"), H, (read, read), init=init.hidden(H, read), bias=options.bias, shard=self.shard_groups
        )
        self.dt = ColumnLinear(make.scope("dt"), H, (heads,), init=init.hidden(H, heads), bias=options.bias)
        self.x_conv = Taps(make.scope("x_conv"), (inner,), options)
        self.bc_conv = Taps(make.scope("bc_conv"), (read, read), options, shard=self.shard_groups)

        def per_head(name: str, init: Init) -> nn.Parameter:
            return make.parameter(name, (heads,), role=Role.STATE, init=init, shard=Shard(0), keep_fp32=True)

        self.A_log = per_head("A_log", Init("between", 16.0, 1.0, then=np.log))
        self.D = per_head("D", ONES)
        self.dt_bias = per_head(
            "dt_bias", time_steps(options.time_step_low, options.time_step_high, options.time_step_floor)
        )
        self.norm = None
        if options.norm != "none":
            self.norm = make.parameter("norm.weight", (inner,), role=Role.NORM, init=ONES, shard=Shard(0))
        self.output = RowLinear(make.scope("output"), inner, H, init=init.output(inner, H), bias=options.bias)

    def forward(self, x: Tensor, stream: Stream, state: Mamba2State | None = None) -> Tensor:
        options = self.options
        starts, past = document_begins(stream, state, self.context), state or Mamba2State()
        x = enter(scaled(x, options.input_multiplier), self.mesh)
        if self.compiles and torch.compiler.is_compiling():
            return scaled(self.output(self._in_graph(x, starts)), options.output_multiplier)
        z, value, bc, dt = self._project(x)
        able = self.kernels if state is None and self.context.size == 1 else "torch"
        convolve: Callable = CONVOLUTIONS[able]
        scan: Callable = SCANS[able]
        x_before, bc_before = (
            taps_before(self.context, each, old, options.convolution, starts)
            for each, old in ((value, past.x), (bc, past.bc))
        )
        v = convolve(value, *self.x_conv.taps(), x_before, starts)
        B, C = convolve(bc, *self.bc_conv.taps(), bc_before, starts).chunk(2, dim=-1)
        B, C = (self._used_groups(each.unflatten(-1, (-1, options.state_size))) for each in (B, C))
        v, limits = v.unflatten(-1, (self.heads, -1)), (options.least_step, options.most_step)
        sizes: dict[str, Any] = {"chunk": options.chunk, "limits": limits}
        before = past.memory
        if able == "fla":
            sizes["parts"] = self.prepared, self.scanned
        if self.context.size > 1:
            of = functools.partial(ends, **sizes)
            made, left = recomputed(of, v, dt, self.dt_bias, self.A_log, B, starts)
            before = carried_by_decay(self.context, made, left, before)
        inputs = v, dt, self.dt_bias, self.A_log, self.D, B, C
        y, memory = scan(*inputs, **sizes, initial_BhPN=before, starts_BS=starts)
        if state is not None:
            state.x, state.bc = (
                taps_after(self.context, each, old, options.convolution, starts)
                for each, old in ((value, x_before), (bc, bc_before))
            )
            state.memory = self.context.to_first(memory)
            state.document = last_document(self.context, stream)
        y_BsH = self.output(recomputed(self._gated, y.flatten(2, 3), z, self.norm))
        return scaled(y_BsH, options.output_multiplier)

    def prepare(self, stream: Stream) -> None:
        """Put starts of documents into the stream's memo, so that a compiled block does not trace them."""
        document_begins(stream, None, self.context)

    def _in_graph(self, x_BSH: Tensor, starts: Tensor | None) -> Tensor:
        """The input of the last product in a compiled block, which has whole sequences and all heads. Its loops
        convolve, and the scan is an operation. Plain products of the input are one."""
        by, products = self.options.multipliers, (self.zx, self.bc, self.dt)
        if by.x == by.B == by.C and all(each.is_plain() for each in products):
            inner, read, heads = (len(each.weight) for each in products)
            parts = joined(products, x_BSH).split([inner // 2, inner // 2 + read, heads], -1)
            z, both, dt = (scaled(each, own) for each, own in zip(parts, (by.z, by.x, by.dt)))
        else:
            z, value, bc, dt = self._project(x_BSH)
            both = torch.cat([value, bc], -1)
        taps = *self.x_conv.taps(), *self.bc_conv.taps()
        *steps, D = over_tokens([self.dt_bias, self.A_log, self.D], dt)
        *rows, x = recomputed_in_graph(self._rows, both, *taps, dt, *steps, starts)
        y = gated_output(simple_gla.operation(*rows)[0], x, D).flatten(2, 3)
        weight = None if self.norm is None else over_tokens([self.norm], y)[0].to(self.norm.dtype)
        return self._gated(y, z, weight)

    def _rows(self, both: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        """`gated_rows` of what is not convolved yet, and x.

        Args:
            inputs: weights and biases of the convolutions, dt, dt_bias, A_log and starts.
        """
        of_x, x_bias, of_bc, bc_bias, dt, dt_bias, A_log, starts = inputs
        K, groups, read = self.options.convolution, self.options.groups, self.bc.weight.shape[0] // 2
        biases = [] if x_bias is None else [torch.cat([x_bias, bc_bias])]
        taps = over_tokens([torch.cat([of_x, of_bc])[:, 0].T, *biases], both)
        convolved = in_graph(both, taps[:K], taps[K] if biases else None, starts)
        x, B, C = convolved.split([both.shape[-1] - 2 * read, read, read], -1)
        x, B, C = (each.unflatten(-1, (n, -1)) for each, n in ((x, self.heads), (B, groups), (C, groups)))
        rows = gated_rows(x, dt, dt_bias, A_log, B, C, starts, (self.options.least_step, self.options.most_step))
        return *(each.contiguous() for each in rows), x

    def _project(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gate z, inner channels x, [B C], and time steps."""
        by = self.options.multipliers
        z, x = self.zx(x_BSH).chunk(2, dim=-1)
        bc = self.bc(x_BSH)
        if by.B == by.C:
            bc = scaled(bc, by.B)
        else:
            bc = torch.cat([scaled(each, each_by) for each, each_by in zip(bc.chunk(2, dim=-1), (by.B, by.C))], -1)
        return scaled(z, by.z), scaled(x, by.x), bc, scaled(self.dt(x_BSH), by.dt)

    def _used_groups(self, x_BSgN: Tensor) -> Tensor:
        """B or C of the groups that this rank's heads use, so that the heads are equal shares of them."""
        if self.shard_groups:
            return x_BSgN
        if len(set(self.group_of_head)) == 1:
            return x_BSgN[:, :, self.group_of_head[:1]]
        return x_BSgN[:, :, self.group_of_head]

    def _gated(self, y_BSd: Tensor, z_BSd: Tensor, weight_d: Tensor | None) -> Tensor:
        """norm(y * silu(z)), norm(y) * silu(z), or y * silu(z)."""
        y, gate, dtype = at_least_fp32(y_BSd), F.silu(at_least_fp32(z_BSd)), y_BSd.dtype
        if weight_d is None:
            return (y * gate).to(dtype)
        if self.options.norm == "before_gate":
            return (self._normed(y) * weight_d * gate).to(dtype)
        return self._normed(y * gate).to(dtype) * weight_d

    def _normed(self, y_BSd: Tensor) -> Tensor:
        """RMSNorm over the channels of each group, which may lie on several ranks."""
        if self.shard_groups:  # whole groups, so that no sum over the ranks is needed
            grouped = y_BSd.unflatten(-1, (self.options.groups // self.mesh.tensor.size, -1))
            return rms_norm(grouped, None, self.epsilon).flatten(2)
        y = y_BSd.unflatten(-1, (self.heads, -1))
        of_head = torch.tensor(self.group_of_head, device=y.device)
        squares = y.new_zeros((*y.shape[:2], self.options.groups)).index_add(-1, of_head, y.square().sum(-1))
        squares = sum_over(squares, self.mesh.tensor)
        channels = self.channels * self.mesh.tensor.size // self.options.groups
        scale = torch.rsqrt(squares / channels + self.epsilon)[..., of_head]
        return (y * scale.unsqueeze(-1)).flatten(2, 3)

    @staticmethod
    def sends(model: ModelSection, options: Mamba2Options, tensor: TensorAxis) -> list[Event]:
        H, read, ranks = model.hidden_size, 2 * options.groups * options.state_size, tensor.ranks
        inner, cut = inner_channels(options, H), options.groups % ranks == 0
        widths = 2 * inner // ranks, read // (ranks if cut else 1), inner // options.head_dim // ranks
        doors = [Enter(H), *column_events(tensor, *widths), *row_events(H, options.bias, tensor, inner)]
        if cut:
            return doors
        taps: list[Event] = [Shared(read * options.convolution)]
        taps += [Shared(read)] if options.convolution_bias else []
        # of the norm, which keeps only its inputs
        sums = [] if options.norm == "none" else [Summed(options.groups, wide=True, again=True)]
        return [*whole_events(read, H, options.bias), *taps, *sums, *doors]

    @staticmethod
    def exchanges(model: ModelSection, options: Mamba2Options, around: Around) -> list[LayerMessage]:
        ranks, taps = around.tensor, options.convolution - 1
        d = inner_channels(options, model.hidden_size) // ranks
        read = 2 * options.groups * options.state_size // (1 if options.groups % ranks else ranks)
        return scan_messages(around, taps * d, taps * read, made=d * options.state_size, left=d // options.head_dim)

    @staticmethod
    def counts(model: ModelSection, options: Mamba2Options, sequence_length: int) -> Counts:
        H, N, K = model.hidden_size, options.state_size, options.convolution
        inner = inner_channels(options, H)
        heads, read = inner // options.head_dim, 2 * options.groups * N
        norm = 0 if options.norm == "none" else inner
        chunk = min(options.chunk, sequence_length)
        projections = H * (2 * inner + read + heads)
        biases = (2 * inner + read + heads + H if options.bias else 0) + (
            inner + read if options.convolution_bias else 0
        )
        # Inside chunks: C B^T per group and its product with x. Between chunks: products with the state.
        scan = chunk * (options.groups * N + inner) + 2 * N * inner
        made = 2 * inner + read + heads
        return Counts(
            parameters=projections + inner * H + K * (inner + read) + biases + 3 * heads + norm,
            flops=2 * (projections + inner * H + K * (inner + read) + scan),
            activations=made + (inner + read) + inner + inner,  # convolved, scanned, normed
            products=made + H + chunk * options.groups + 2 * inner + inner * N // chunk,
            state=N * inner + (K - 1) * (inner + read),
            memory=N * inner,
        )

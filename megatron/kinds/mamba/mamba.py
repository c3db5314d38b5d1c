"""Mamba (Gu and Dao 2023), cut over tensor parallel ranks by channels.

With `heads` each equal part of the channels makes its own time steps, B and C (Zamba, Glorioso et al. 2024).
With `inner_norms` these are normalised (Jamba, Lieber et al. 2024).

Shapes: B samples, S positions, H hidden, R rank of the time steps, N state elements. This rank has d inner channels and
n heads of w channels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection, NormOptions
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.convolution import Taps, causal_convolution, of_causal_conv1d
from megatron.kinds.mamba.options import MAMBA, MambaOptions
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, Summed, TensorAxis, column_events, norm, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.kernels.choice import choose_kernels
from megatron.model.norm import Norm, norm_activations
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, sum_over
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, Init, formula, time_steps
from megatron.parallel.layout.shard import Role, Shard

from ..common.recurrence.sequence_scan import carried_by_decay, document_begins, last_document, taps_after, taps_before
from .selective_scan import ends, scan_of_mamba_ssm, selective_scan


@dataclass
class MambaState:
    """State between pieces of a sequence. Gradients may flow through it."""

    x: Tensor | None = None  # the last K - 1 inputs of the convolution, [B, K - 1, d]
    memory: Tensor | None = None  # [B, d, N], fp32
    document: Tensor | None = None  # int [B], document of the last token, where there are documents


class TimeSteps(ColumnLinear):
    """[B, S, n, R] to [B, S, d]: each head's channels of that head's R numbers."""

    def forward(self, dt_BSnR: Tensor) -> Tensor:
        heads = dt_BSnR.unbind(2)
        parts = self.weight.chunk(len(heads))
        return _joined([F.linear(*each) for each in zip(heads, parts)])


class Mamba(nn.Module):
    """x [B, s, H] to its output [B, s, H]: output(scan(silu(conv(u))) * silu(z)).

    With columns all but `zx` and `output` is whole over them, as in Mamba-2."""

    # See `finished` in engine/deepspeed/buckets.py.
    uses = ("zx", "x_conv.bias", "x_conv.weight", "dt_bc", "norms", "dt", "dt_bias", "A_log", "D", "output")

    new_state = MambaState

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MambaOptions, init: Initialisation):
        super().__init__()
        H, N, R = model.hidden_size, options.state_size, options.rank
        self.mesh, self.context, self.options = make.mesh, make.context, options
        inner = options.expand * model.hidden_size
        self.fused = choose_kernels(model.kernels, MAMBA, make.device)[0] == "mamba_ssm"
        self.zx = ColumnLinear(make.scope("zx"), H, (inner, inner), init=init.hidden(H, inner), bias=options.bias)
        self.x_conv = Taps(make.scope("x_conv"), (inner,), options)
        self.dt_bc = make.parameter(
            "dt_bc.weight",
            (R + 2 * N, inner),
            role=Role.HIDDEN,
            init=init.hidden(inner // options.heads, R + 2 * N),
            shard=Shard(1),
            matrices=(R, N, N),
        )
        self.dt = TimeSteps(make.scope("dt"), R, (inner,), init=Init("uniform", R**-0.5), folds=False, stream=False)
        self.norms = None
        if options.inner_norms:  # every rank uses them for its own channels
            kind, sizes = inner_norm(model), {"dt_norm": R, "B_norm": N, "C_norm": N}
            self.norms = nn.ModuleList(
                Norm(make.scope(each), size, kind, partial=True, stream=False) for each, size in sizes.items()
            )

        def per_channel(name: str, init: Init, *further: int) -> nn.Parameter:
            return make.parameter(name, (inner, *further), role=Role.STATE, init=init, shard=Shard(0), keep_fp32=True)

        self.dt_bias = per_channel(
            "dt_bias", time_steps(options.time_step_low, options.time_step_high, options.time_step_floor)
        )
        self.A_log = per_channel("A_log", formula(lambda channel, n: np.log(n + 1.0)), N)
        self.D = per_channel("D", ONES)
        self.output = RowLinear(make.scope("output"), inner, H, init=init.output(inner, H), bias=options.bias)

    def forward(self, x: Tensor, stream: Stream, state: MambaState | None = None) -> Tensor:
        x_BSH = enter(x, self.mesh)
        z, u = self.zx(x_BSH).chunk(2, dim=-1)
        past = state or MambaState()
        starts = document_begins(stream, state, self.context)
        fused = self.fused and state is None and self.context.size == 1
        convolve: Callable = of_causal_conv1d if fused else causal_convolution
        scan: Callable = scan_of_mamba_ssm if fused else selective_scan
        before = taps_before(self.context, u, past.x, self.options.convolution, starts)
        v = convolve(u, *self.x_conv.taps(), before, starts)
        dt, B, C = self._read(v)
        dt = self.dt(dt)
        initial = past.memory if self.context.size == 1 else self._memory_before(v, dt, B, starts, past.memory)
        y, memory = self._scanned(scan, (v, z, dt), (B, C), initial, starts)
        if state is not None:
            state.x = taps_after(self.context, u, before, self.options.convolution, starts)
            state.memory = None if memory is None else self.context.to_first(memory)
            state.document = last_document(self.context, stream)
        return self.output(y)

    def _read(self, v_BSd: Tensor) -> list[Tensor]:
        """Time steps [B, S, n, R], B and C [B, S, n, N] of this rank's heads."""
        axis, heads = self.mesh.tensor, self.options.heads
        n = max(1, heads // axis.size)
        parts = [F.linear(*each) for each in zip(v_BSd.chunk(n, -1), self.dt_bc.chunk(n, 1))]
        made = parts[0].unsqueeze(2) if n == 1 else torch.stack(parts, 2)
        if heads % axis.size:  # several ranks share a head: each has some of the channels that these are made of
            own = axis.rank * heads // axis.size
            every = sum_over(F.pad(made, (0, 0, own, heads - 1 - own)), axis) if heads > 1 else sum_over(made, axis)
            made = every.narrow(2, own, 1)
        found = made.split([self.options.rank, self.options.state_size, self.options.state_size], -1)
        return list(found) if self.norms is None else [norm(part) for norm, part in zip(self.norms, found)]

    def _scanned(
        self,
        scan: Callable,
        channels: tuple[Tensor, ...],
        read: tuple[Tensor, ...],
        memory_BdN: Tensor | None,
        starts_BS: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The scans of this rank's heads, side by side: [B, S, d], and the state after them.

        Args:
            channels: [B, S, d] each, with a part for every head.
            read: [B, S, n, N] each.
        """
        n = read[0].shape[2]
        before = [None] * n if memory_BdN is None else memory_BdN.chunk(n, 1)
        heads = zip(
            zip(*(each.chunk(n, -1) for each in channels)),
            zip(*(each.chunk(n) for each in (self.dt_bias, self.A_log, self.D))),
            zip(*(each.unbind(2) for each in read)),
            before,
        )
        y, after = zip(
            *(
                scan(*mine, *own, *shared, chunk=self.options.chunk, initial_BdN=initial, starts_BS=starts_BS)
                for mine, own, shared, initial in heads
            )
        )
        return _joined(y), None if after[0] is None else _joined(after, 1)

    def _memory_before(
        self, v_BSd: Tensor, dt_BSd: Tensor, B_BSnN: Tensor, starts_BS: Tensor | None, of_state: Tensor | None
    ) -> Tensor:
        heads = zip(*(each.chunk(B_BSnN.shape[2], -1) for each in (v_BSd, dt_BSd)), strict=True)
        own = zip(*(each.chunk(B_BSnN.shape[2]) for each in (self.dt_bias, self.A_log)), strict=True)
        made, left = zip(
            *(
                ends(v, dt, dt_bias, A_log, B, chunk=self.options.chunk, starts_BS=starts_BS)
                for (v, dt), (dt_bias, A_log), B in zip(heads, own, B_BSnN.unbind(2), strict=True)
            ),
            strict=True,
        )
        return carried_by_decay(self.context, _joined(made, 1), _joined(left, 1), of_state)

    @staticmethod
    def sends(model: ModelSection, options: MambaOptions, tensor: TensorAxis) -> list[Event]:
        H, made = model.hidden_size, options.rank + 2 * options.state_size
        inner = options.expand * H
        products = column_events(tensor, 2 * inner // tensor.ranks)
        sums: list[Event] = [Summed(options.heads * made)] if options.heads % tensor.ranks else []
        sizes = (options.rank, options.state_size, options.state_size) if options.inner_norms else ()
        norms = [event for size in sizes for event in norm(inner_norm(model), size)]
        return [Enter(H), *products, *sums, *norms, *row_events(H, options.bias, tensor, inner)]

    @staticmethod
    def exchanges(model: ModelSection, options: MambaOptions, around: Around) -> list[LayerMessage]:
        d = options.expand * model.hidden_size // around.tensor
        memory = d * options.state_size
        return scan_messages(around, (options.convolution - 1) * d, made=memory, left=memory)

    @staticmethod
    def counts(model: ModelSection, options: MambaOptions, sequence_length: int) -> Counts:
        H, N, R, K = model.hidden_size, options.state_size, options.rank, options.convolution
        inner = options.expand * H
        matrices = 3 * inner * H + inner * (R + 2 * N) + inner * R
        biases = (2 * inner + H if options.bias else 0) + (inner if options.convolution_bias else 0)
        made = 2 * inner + options.heads * (R + 2 * N) + inner  # z, u, B, C, time steps before and after projection
        sizes = (R, N, N) if options.inner_norms else ()
        return Counts(
            parameters=matrices + biases + inner * (K + N + 2) + sum(sizes),
            flops=2 * (matrices + inner * (K + N)),  # of the scan, the product of states and C
            # convolved, scanned
            activations=made
            + 2 * inner
            + options.heads * sum(norm_activations(inner_norm(model), each) for each in sizes),
            products=made + H + inner,
            state=inner * (N + K - 1),
            memory=inner * N,
        )


def inner_norm(model: ModelSection) -> NormOptions:
    """RMSNorm with the epsilon of the stack's norms."""
    return model.norm.model_copy(update={"type": "rmsnorm"})


def _joined(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """The parts in one tensor. A single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)

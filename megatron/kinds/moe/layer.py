"""The mixture of experts as a feed-forward network: from the stream to the stream.

Shapes: B samples, S positions, s positions of this rank, T = B S tokens, H hidden, E experts, k experts per token."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.routes import route_names
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.activations import ACTIVATIONS, SAVED
from megatron.kinds.moe.losses import Balance
from megatron.kinds.moe.options import MoEOptions
from megatron.model.costs.exchanges import BEHIND, LAST, Around, LayerMessage
from megatron.model.costs.traffic import (
    Across,
    Enter,
    Event,
    Leave,
    Shared,
    TensorAxis,
    column_events,
    gathered_gradients,
    stream_norm,
    whole_events,
)
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.norm import Norm, norm_activations, norm_parameters
from megatron.model.recompute import decide_once, repeating
from megatron.model.stream import COLUMNS, LOSS, TOKEN_CHANNEL, TOKENS, Channel, Stream, sum_of_losses, token_ids
from megatron.parallel.layers.collectives import enter, leave, split_channels, sum_gradient, sum_over
from megatron.parallel.layers.linear import ColumnLinear, PartialLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES
from megatron.parallel.layout.mesh import ALONE
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.random import sequence_counters, site_key, uniform
from megatron.parallel.layout.shard import Role

from .dispatch import AllToAllDispatch, LocalDispatch, dispatch_messages, row_messages
from .experts import Experts
from .losses import Routed, auxiliary_losses, count, sums_of_samples
from .permute import Rows, combine, permute, placed, sort_by_expert, spread, total
from .router import (
    STATE,
    ExpertChoice,
    LinearRouter,
    MLPRouter,
    choose_experts,
    classes,
    expert_table,
    replace_none,
    router_counts,
    router_tensors,
    router_width,
    scores_of,
    weights_of,
)


class Gate(nn.Module):
    """x [T, H] to a number in (0, 1) per token, fp32 [T, 1]."""

    def __init__(self, make: ParameterFactory, hidden_size: int, init: Initialisation):
        super().__init__()
        self.axis, self.columns = make.mesh.tensor, make.mesh.columns
        start = init.reads(hidden_size, 1)
        self.weight = make.parameter("weight", (1, hidden_size), role=Role.ROUTER, init=start, keep_fp32=True, stream=1)

    def forward(self, x_TH: Tensor) -> Tensor:
        part_T1 = F.linear(at_least_fp32(x_TH), sum_gradient(self.weight, self.axis))
        return sum_over(part_T1, self.columns).sigmoid()


class SharedExpert(nn.Module):
    """The expert that every token uses (DeepSeekMoE, Dai et al. 2024): x [T, H] to this rank's part of its output, [T,
    H], inside the same tensor region as the others."""

    def __init__(self, make: ParameterFactory, hidden_size: int, options: MoEOptions, init: Initialisation):
        super().__init__()
        H, width = hidden_size, options.shared_size
        self.gated, self.activation, self.limit = options.gated, ACTIVATIONS[options.activation], options.shared_limit
        name, parts = ("gate_up", (width, width)) if options.gated else ("up", (width,))
        self.up = ColumnLinear(make.scope(name), H, parts, init=init.hidden(H, width))
        self.down = PartialLinear(make.scope("down"), width, H, init=init.output(width, H))
        self.gate = Gate(make.scope("gate"), H, init) if options.shared_gate else None

    def forward(self, x_TH: Tensor) -> Tensor:
        h = self.up(x_TH)
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            h = self.activation(gate) * up
        else:
            h = self.activation(h)
        y_TH = self.down(h)
        return y_TH if self.gate is None else (at_least_fp32(y_TH) * self.gate(x_TH)).to(y_TH.dtype)


class OwnNorms(nn.Module):
    """[B, S, H] parts of the experts' and of the shared expert's output to the sum [B, s, H] of both, normalised."""

    def __init__(self, make: ParameterFactory, model: ModelSection):
        super().__init__()
        self.mesh, H = make.mesh, model.hidden_size
        self.routed_norm, self.shared_norm = (
            Norm(make.scope(f"{name}_norm"), H, model.norm, partial=make.mesh.layout.sequence)
            for name in ("routed", "shared")
        )

    def forward(self, routed_BSH: Tensor, shared_BSH: Tensor) -> Tensor:
        return self.routed_norm(leave(routed_BSH, self.mesh)) + self.shared_norm(leave(shared_BSH, self.mesh))


class MoE(nn.Module):
    """x [B, s, H] to the weighted sum of each token's experts (and the shared one), [B, s, H]."""

    compiled_parts: tuple[str, ...] = ("measured", "placed", "spread", "total", "charged")
    placed, spread, total = staticmethod(placed), staticmethod(spread), staticmethod(total)

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MoEOptions, init: Initialisation):
        super().__init__()
        self.mesh, self.context, self.options = make.mesh, make.context, options
        self.ranks, self.data = make.mesh.tensor.size, ALONE
        if options.losses.over == "ranks":
            self.data, self.compiled_parts = make.mesh.data, self.compiled_parts[:-1]  # the last part sums over them
        router = MLPRouter if options.router.network == "mlp" else LinearRouter
        self.router = router(make.scope("router"), model, options, init)
        self.balance = Balance(make.scope("router"), options)
        self.table: Tensor | None = None
        if options.router.select == "hash":
            self.table = expert_table(make.scope("router"), model, options)
        self.latent_down = self.latent_up = None
        H, latent = model.hidden_size, options.latent_size
        if latent is not None:
            # Whole on every rank, which has part of the experts: the gradients are summed. latent_up does not have the
            # role OUTPUT, as the experts' down does. In a block that starts as the identity both would stay 0.
            self.latent_down = ColumnLinear(
                make.scope("latent_down"), H, (latent,), init=init.hidden(H, latent), shard=False
            )
            self.latent_up = ColumnLinear(
                make.scope("latent_up"), latent, (H,), init=init.output(latent, H), shard=False
            )
        self.experts = Experts(make.scope("experts"), latent or H, options, init)
        self.exchange = AllToAllDispatch(make.mesh) if make.mesh.layout.sends_tokens else LocalDispatch()
        self.order: Tensor | None = None  # place of each expert on all ranks, if not its number
        self.jitter_key = site_key(make.seed, make.prefix, "jitter")
        self.shared = None
        if options.shared_size:
            self.shared = SharedExpert(make.scope("shared"), model.hidden_size, options, init)
        self.expert_scale = self.routed_scale = self.shared_scale = self.own = None
        if options.router.expert_scale:
            self.expert_scale = make.parameter(
                "router.expert_scale", (options.experts,), role=Role.NORM, init=ONES, keep_fp32=True
            )
        if options.own_norms:
            self.routed_scale = make.parameter("routed_scale", (H,), role=Role.NORM, init=ONES, stream=0)
            self.shared_scale = make.parameter("shared_scale", (H,), role=Role.NORM, init=ONES, stream=0)
            self.own = OwnNorms(make, model)

    def forward(
        self, x: Tensor, stream: Stream, cache: Routed | None = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        x_BSH = enter(x, self.mesh)
        x_TH = x_BSH.flatten(0, 1)
        logits_TE, channels = self.router(self._jittered(x_BSH, stream), stream)
        scores_TE = scores_of(logits_TE, self.options.router.score)
        choice = decide_once(lambda: self._choose(logits_TE, scores_TE, stream))
        placed = replace_none(choice, self.options)
        if self.order is not None:
            placed = ExpertChoice(self.order[placed.of_tokens])
        capacity = self._capacity(len(x_TH))
        rows = sort_by_expert(placed, self.options.experts, len(x_TH), capacity, self.placed)
        if not self.training:  # the number of tokens may differ between ranks
            rows = replace(rows, each=None)
        if x_BSH.shape[1] == 1 and not self.training and choice.experts_Tk is not None:
            # The order of a token's sums over tensor parallel ranks must not follow from the tokens decoded with it.
            rows = replace(rows, owner_T=choice.experts_Tk[:, 0].long())
        own = None if self.expert_scale is None else sum_gradient(self.expert_scale, self.mesh.tensor)
        chosen = choice.experts_Tk, choice.tokens_EC
        weights, *sums = self.measured(logits_TE, scores_TE, *chosen, own, len(x_BSH))
        y_TH = self._routed(self._scaled(x_TH, self.routed_scale), weights, rows)
        shared_TH = self._scaled(x_TH, self.shared_scale)
        if self.own is not None and self.shared is not None:
            y = self.own(y_TH.view_as(x_BSH), self.shared(shared_TH).view_as(x_BSH))
        else:
            y_TH = y_TH if self.shared is None else y_TH + self.shared(shared_TH)
            y = leave(y_TH.view_as(x_BSH), self.mesh)
        channels = {**channels, **self._account(y, len(x_TH), sums, rows, stream, cache)}
        return (y, channels) if channels else y

    def _scaled(self, x: Tensor, vector: Tensor | None) -> Tensor:
        """x, of this rank's use, times a trained vector, if there is one."""
        return x if vector is None else x * sum_gradient(vector, self.mesh.tensor)

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, stream: Stream) -> ExpertChoice:
        """The router's choice, or the recorded experts of tokens that have some. Their weights are the present ones."""
        if self.table is not None:
            choice = ExpertChoice(self.table[token_ids(stream).flatten()].long())
        else:
            choice = self.choose(logits_TE, scores_TE)
        columns, names = stream.memo.get(COLUMNS, {}), route_names(self.balance.layer, self.options.top_k)
        if names[0] in columns:
            given_Tk = torch.stack([columns[name] for name in names], -1).flatten(0, 1).long()
            choice = ExpertChoice(torch.where(given_Tk < 0, choice.of_tokens, given_Tk))
        if self.balance.recorded is not None:
            self.balance.recorded.append(choice.of_tokens)
        return choice

    def choose(self, logits_TE: Tensor, scores_TE: Tensor) -> ExpertChoice:
        """Each token's experts. Decoding may replace it (`fetched.py`)."""
        return choose_experts(logits_TE, scores_TE, self.balance.correction, self.options, self.training)

    def best(self, x_BSH: Tensor, stream: Stream) -> Tensor:
        """The best expert of each token [T], which `forward` would choose. The number of experts stands for none."""
        logits_TE, _ = self.router(x_BSH, stream)
        return self.choose(logits_TE, scores_of(logits_TE, self.options.router.score)).of_tokens[:, 0]

    def _jittered(self, x_BSH: Tensor, stream: Stream) -> Tensor:
        """The router's input, in training times noise that is drawn by key."""
        width = self.options.router.jitter
        if not width or not self.training:
            return x_BSH
        places, columns = self.context.places(x_BSH.shape[1], x_BSH.device) + stream.first, self.mesh.columns
        counters = split_channels(sequence_counters(places, x_BSH.shape[2] * columns.size), columns)
        return at_least_fp32(x_BSH) * (
            1.0 - width + 2.0 * width * uniform(self.jitter_key, stream.sample_numbers, counters)
        )

    def _routed(self, x_TH: Tensor, weights: Tensor, rows: Rows) -> Tensor:
        """This rank's part of the experts' outputs."""
        weights = sum_gradient(weights, self.mesh.columns)  # each column has other channels of the outputs
        x_TH = x_TH if self.latent_down is None else split_channels(self.latent_down(x_TH), self.mesh.columns)
        sent_RH, ends_E, sent = self.exchange.send(permute(x_TH, rows, self.spread), rows)
        y_RH = self.exchange.back(self.experts(sent_RH, ends_E), sent)
        y_TH = combine(y_RH, rows, weights, self.total)
        return y_TH if self.latent_up is None else split_channels(self.latent_up(y_TH), self.mesh.columns)

    def new_state(self) -> Routed:
        """Sums over earlier chunks of the same samples for the losses. Decoding does not read them."""
        return Routed()

    def measured(
        self,
        logits_TE: Tensor,
        scores_TE: Tensor,
        experts_Tk: Tensor | None,
        tokens_EC: Tensor | None,
        scale_E: Tensor | None,
        samples: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Weights of a choice. In training also these tokens' counts, scores and logits for `Routed`."""
        choice, options = ExpertChoice(experts_Tk, tokens_EC), self.options
        if experts_Tk is not None:
            weights = weights_of(scores_TE, experts_Tk, options, scale_E)
        else:
            weights = scores_TE.T.gather(1, choice.of_experts).flatten() * options.router.scale
        if not self.training:
            return weights, None, None, None
        counts_BC = count(choice, samples, classes(options))
        return weights, counts_BC, *sums_of_samples(logits_TE, scores_TE, len(counts_BC), options)

    def _account(
        self, y: Tensor, tokens: int, sums: Sequence[Tensor | None], rows: Rows, stream: Stream, state: Routed | None
    ) -> dict[str, Tensor]:
        """The channel of auxiliary losses with this layer's added at the last chunk of a sequence, where the layer has
        any. In training they and the load go to the layer's tally."""
        options, dropped, experts = self.options.losses, None, self.options.experts
        routed, every_BC = state or Routed(), sums[0]
        if every_BC is not None:
            if rows.kept_Tk is not None:
                dropped = (~rows.kept_Tk).sum()
            elif every_BC.shape[1] > experts:
                dropped = every_BC[:, experts:].sum()
            routed.add(tokens // len(every_BC), every_BC, dropped, *sums[1:])
        has_loss, before = bool(options.balance or options.sequence or options.z), stream.channels.get(LOSS)
        if every_BC is None or not (stream.chunk is None or stream.chunk.last):
            if not has_loss:
                return {}
            return {LOSS: y.new_zeros((*y.shape[:2], 1)) if before is None else before}
        assert routed.counts_BE is not None
        counts_BE = routed.counts_BE[:, :experts]
        # The head averages over all tokens, and only the last chunk's have the loss.
        share = None if stream.chunk is None else stream.chunk.whole / stream.chunk.tokens
        summed_BE = self.context.sum(counts_BE)
        numbers = routed.share_BE, routed.z_B, summed_BE, counts_BE, routed.dropped, routed.tokens
        loss, row = self.charged(*numbers, share, before, y)
        if not repeating():
            self.balance.add(row)
        return {LOSS: loss} if loss is not None else {}

    def charged(
        self,
        share_BE: Tensor | None,
        z_B: Tensor | None,
        summed_BE: Tensor,
        counts_BE: Tensor,
        dropped: Tensor | None,
        tokens: int,
        share: float | None,
        before: Tensor | None,
        y: Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        """The channel of auxiliary losses with this layer's, if any, and a micro-batch's numbers for the tally.

        Every tensor parallel rank adds its share: the router's gradients are summed over them."""
        options = self.options.losses
        losses = auxiliary_losses(share_BE, z_B, summed_BE, tokens, options, self.data)
        row = self.balance.numbers(counts_BE.sum(0), dropped, losses)
        if not losses:
            return None, row
        first, *more = [getattr(options, name) * loss for name, loss in losses.items()]
        loss = sum(more, first)
        loss = loss if self.ranks == 1 else loss / self.ranks
        loss = loss if share is None else loss * share
        return sum_of_losses(before, y, loss), row

    @staticmethod
    def channels(model: ModelSection, options: MoEOptions, ranks: int) -> dict[str, Channel]:
        own = options.losses
        loss = {LOSS: Channel(1)} if own.balance or own.sequence or own.z else {}
        ids = {TOKENS: TOKEN_CHANNEL} if options.router.select == "hash" else {}
        return (
            loss | ids | ({STATE: Channel(options.router.width, whole=True)} if options.router.network == "mlp" else {})
        )

    def _capacity(self, tokens: int) -> int | None:
        factor = self.options.capacity_factor
        if factor is None or self.options.router.select == "expert_choice":
            return None
        return max(1, math.ceil(factor * tokens * self.options.top_k / self.options.experts))

    @staticmethod
    def sends(model: ModelSection, options: MoEOptions, tensor: TensorAxis) -> list[Event]:
        """Messages on the tensor axis, except for spread experts and for rows of experts."""
        H, columns, made = model.hidden_size, tensor.columns, 2 if options.gated else 1
        latent, shared = options.latent_size, options.shared_size // tensor.ranks
        found: list[Event] = [Shared(size, wide=True) for size in router_tensors(H // columns, options)]
        found += 2 * whole_events(latent, H) if latent else []
        found += 2 * [Shared(H // columns)] if options.own_norms else []
        if shared and options.shared_gate:
            found.append(Shared(H // columns, wide=True))
        after: list[Event] = 2 * stream_norm(model.norm, H, tensor) if options.own_norms else []
        if columns > 1:
            found += [Across(router_width(options), backward=False, wide=True)]
            found += [Across(options.top_k, forward=False, wide=True)]
            found += [*column_events(tensor, latent), *gathered_gradients(tensor, latent, H)] if latent else []
            # The last product of a layer without a shared expert is that of latent_up.
            (found if shared else after).extend(column_events(tensor, H) if latent else [])
            found += [*column_events(tensor, made * shared), Across(shared, forward=False)] if shared else []
            found += [Across(1, wide=True)] if shared and options.shared_gate else []
        return [Enter(H), *found, *[Leave(H)] * (2 if options.own_norms else 1), *after]

    @staticmethod
    def exchanges(model: ModelSection, options: MoEOptions, around: Around) -> list[LayerMessage]:
        """Sums of the choices over the ranks that share a sample, and over all ranks for one loss, with the last
        chunk."""
        samples = 1 if options.router.select == "expert_choice" else around.samples
        size = samples * options.experts
        load = LayerMessage("context", "all_reduce", size, "fp32", again=BEHIND, training=True, chunks=LAST)
        found = [load]
        if options.losses.balance and options.losses.over == "ranks":
            found.append(replace(load, axis="data", elements=options.experts))
        own = (options.latent_size or model.hidden_size) // around.mesh.columns.size
        return [*found, *dispatch_messages(own, options, around), *row_messages(options, around)]

    @staticmethod
    def needs_output(model: ModelSection, options: MoEOptions) -> bool:
        """Whether the backward pass needs tensors after the sum over the ranks: of norms and of auxiliary losses."""
        return bool(options.own_norms or options.losses.balance or options.losses.sequence or options.losses.z)

    @staticmethod
    def counts(model: ModelSection, options: MoEOptions, sequence_length: int) -> Counts:
        H, E, k, width = model.hidden_size, options.experts, options.top_k, options.hidden_size
        sides = 3 if options.gated else 2
        inner, latent = options.latent_size or H, options.latent_size or 0  # the experts' inputs
        expert, shared = sides * inner * width, sides * H * options.shared_size
        router, products = router_counts(H, options)
        gate = H if options.shared_size and options.shared_gate else 0
        made = 2 if options.gated else 1
        bias = made * width + inner if options.bias else 0
        saved = in_shared = SAVED[options.activation][options.gated]
        if options.gated:
            saved += 2 if options.limit is not None else bool(options.up_offset)  # cut and shifted
        # Of each expert of a token: its row, tensors of its activation, its result, its number, place and weight.
        routing = E + 5 * k + (k + 1 if options.router.normalize else 0)
        routing += E if options.router.score == "sqrt_softplus" else 0  # before the root
        routing += 2 * k if options.router.expert_scale else 0  # before it, and the numbers of the experts
        routing += 2 * k if options.bias else 0  # the number of each row's expert again
        network = options.router.width if options.router.network == "mlp" else 0
        routing += 7 * network + bool(network)
        linear = k * (inner + made * width) + (latent + H if latent else 0)  # results of matrices, but for the shared
        routing += bool(options.losses.balance or options.losses.sequence)  # the sum of a token's scores
        own = Counts()
        if options.own_norms:  # its norms, the shared expert's input and the router's in fp32, before and after scales
            norms = 2 * norm_activations(model.norm, H)
            own = Counts(2 * H + 2 * norm_parameters(model.norm, H), activations=2 * H + norms, whole=H, copies=H)
        return own + Counts(
            parameters=E * (expert + bias) + shared + router + gate + 2 * H * latent,
            idle=(E - k) * (expert + bias),
            flops=2 * (k * expert + shared + products + gate + 2 * H * latent),
            activations=k * (2 * inner + saved * width)
            + latent
            + (in_shared + (2 if options.shared_limit is not None else 0)) * options.shared_size
            + routing
            + (H + 1 if gate else 0),
            whole=2 * k * inner + latent + routing + (H + 1 if gate else 0),
            copies=(2 if shared else 1) * H + routing,  # the router's input in fp32, and that of shared experts
            products=linear + (made * options.shared_size + H if shared else 0) + E + 3 * network,
        )

"""Routers: each token's logits of the experts, in fp32 for every type of the stream.

A router is inside of the tensor region: every tensor parallel rank routes all tokens alike, and the gradient from its
slice of the experts is partial. With columns, the products with a rank's channels are summed before anything reads
them. The gradients of the experts' weights are summed too, since each column's outputs are other channels.

Shapes: B samples, S positions, T = B S tokens, H hidden, E classes (the experts, and perhaps none), R router channels.

Which experts a token uses, and with which weights. Everything here is fp32. Nothing that chooses has a gradient.

Shapes: T tokens, E experts, k experts per token, C tokens per expert."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.moe.options import MoEOptions, RouterOptions
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.linear import over_columns
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, ZEROS, generator
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Growth, Role

TINY = 1e-20


@dataclass(frozen=True)
class ExpertChoice:
    """The experts of tokens, or the tokens of experts. Recomputation of activations uses the same choice."""

    experts_Tk: Tensor | None = None  # int64, the experts of each token. None where experts choose.
    tokens_EC: Tensor | None = None  # int64, the tokens of each expert. None where tokens choose.

    @property
    def of_tokens(self) -> Tensor:
        """`experts_Tk`. ValueError where experts choose."""
        if self.experts_Tk is None:
            raise ValueError("experts choose, so tokens have no list of theirs")
        return self.experts_Tk

    @property
    def of_experts(self) -> Tensor:
        """`tokens_EC`. ValueError where tokens choose."""
        if self.tokens_EC is None:
            raise ValueError("tokens choose, so experts have no list of theirs")
        return self.tokens_EC


def scores_of(logits_TE: Tensor, score: str) -> Tensor:
    if score == "sqrt_softplus":
        return F.softplus(logits_TE).sqrt()
    return logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()


@torch.no_grad()
def choose_experts(
    logits_TE: Tensor, scores_TE: Tensor, correction_E: Tensor | None, options: MoEOptions, training: bool
) -> ExpertChoice:
    """The choice of `options.router.select`.

    Args:
        logits_TE: of the router.
        scores_TE: `scores_of` them.
        correction_E: added to the scores here and nowhere else.
    """
    router = options.router
    if router.select == "expert_choice":
        count = max(1, logits_TE.shape[0] * options.top_k // options.experts)
        return ExpertChoice(tokens_EC=scores_TE.topk(min(count, logits_TE.shape[0]), dim=0).indices.T.contiguous())
    if router.select == "sinkhorn" and training:
        return ExpertChoice(sinkhorn(logits_TE, router).topk(options.top_k, dim=-1).indices)
    wanted_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if router.top_groups < router.groups:
        wanted_TE = _within_groups(wanted_TE, router)
    return ExpertChoice(wanted_TE.topk(options.top_k, dim=-1).indices)


def weights_of(
    scores_TE: Tensor, experts_Tk: Tensor, options: MoEOptions, expert_scale_E: Tensor | None = None
) -> Tensor:
    """The weights [T, k] of the chosen experts' outputs, from their uncorrected scores. 0 where no expert is used.

    Args:
        expert_scale_E: the numbers of `router.expert_scale`.
    """
    router, scores_Tk = options.router, scores_TE.gather(1, experts_Tk)
    if router.normalize:
        scores_Tk = scores_Tk / (scores_Tk.sum(-1, keepdim=True) + TINY)
    if router.skip:
        scores_Tk = scores_Tk.masked_fill(experts_Tk == options.experts, 0.0)
    if expert_scale_E is not None:
        numbers_Tk = experts_Tk.clamp(max=options.experts - 1) if router.skip else experts_Tk
        scores_Tk = scores_Tk * expert_scale_E[numbers_Tk]
    return scores_Tk if router.scale == 1.0 else scores_Tk * router.scale


def classes(options: MoEOptions) -> int:
    """Number of choices of a router: the experts, and to use none."""
    return options.experts + options.router.skip


def replace_none(choice: ExpertChoice, options: MoEOptions) -> ExpertChoice:
    """The choice with an expert in place of none (in turn, to be even): such a token's weight is 0."""
    if not options.router.skip:
        return choice
    experts_Tk = choice.of_tokens
    turns = torch.arange(len(experts_Tk), device=experts_Tk.device).unsqueeze(1) % options.experts
    return ExpertChoice(torch.where(experts_Tk == options.experts, turns, experts_Tk))


def _within_groups(wanted_TE: Tensor, router: RouterOptions) -> Tensor:
    """-inf outside of each token's best groups."""
    by_group = wanted_TE.unflatten(-1, (router.groups, -1))
    counted = min(2 if router.group_score == "top_two" else 1, by_group.shape[-1])
    best = by_group.topk(counted, dim=-1).values.sum(-1).topk(router.top_groups, dim=-1).indices
    outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return by_group.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


def sinkhorn(logits_TE: Tensor, router: RouterOptions) -> Tensor:
    """Logarithms of exp(logits) with rows scaled to sums of 1/T and columns to sums of about 1/E: the order within a
    row is balanced.

    The number of rounds is fixed: the published tolerance compares numbers of the size of 1/T with 1e-4, and stops
    after the first round. Logarithms avoid overflow of exponentials in fp32."""
    tokens, experts = (math.log(size) for size in logits_TE.shape)
    column_E = torch.zeros_like(logits_TE[0]) if router.sinkhorn_start == "ones" else -logits_TE.logsumexp(0) - experts
    for _ in range(router.sinkhorn_iterations):
        row_T = -(logits_TE + column_E).logsumexp(1) - tokens
        column_E = -(logits_TE + row_T.unsqueeze(1)).logsumexp(0) - experts
    return logits_TE + row_T.unsqueeze(1) + column_E


def expert_table(make: ParameterFactory, model: ModelSection, options: MoEOptions) -> Tensor:
    """The experts of each token id, [V, k] whole numbers in fp32 that checkpoints keep: k different ones, each set
    equally likely (Floyd's method)."""
    rows, k, E = model.vocab_size, options.top_k, options.experts
    table = make.buffer("table", (rows, k), role=Role.ROUTER)
    if make.values and table.device.type != "meta":
        draw, chosen = generator(make.seed, make.prefix, "table"), np.full((rows, k), -1)
        for place, last in enumerate(range(E - k, E)):
            drawn = draw.integers(0, last + 1, rows)
            taken = (chosen == drawn[:, None]).any(1)
            chosen[:, place] = np.where(taken, last, drawn)
        table.copy_(torch.from_numpy(chosen))
    return table


STATE = "router_state"  # the side channel of MLP routers


class LinearRouter(nn.Module):
    """x [B, S, H] to (logits [T, E], no channels)."""

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MoEOptions, init: Initialisation):
        super().__init__()
        self.axis, self.columns, H, E = make.mesh.tensor, make.mesh.columns, model.hidden_size, classes(options)
        self.weight = make.parameter(
            "weight", (E, H), role=Role.ROUTER, init=init.reads(H, E), keep_fp32=True, stream=1
        )
        self.bias, self.scale, self.root = None, None, H**-0.5
        if options.own_norms:
            self.scale = make.parameter("scale", (H,), role=Role.NORM, init=ONES, keep_fp32=True, stream=0)
        if options.router.bias:
            self.bias = make.parameter("bias", (E,), role=Role.BIAS, init=ZEROS, keep_fp32=True)

    def forward(self, x_BSH: Tensor, stream: Stream) -> tuple[Tensor, dict[str, Tensor]]:
        bias = None if self.bias is None else sum_gradient(self.bias, self.axis)
        x_TH, weight = at_least_fp32(x_BSH.flatten(0, 1)), sum_gradient(self.weight, self.axis)
        if self.scale is not None:
            x_TH = x_TH * (sum_gradient(self.scale, self.axis) * self.root)
        return over_columns(F.linear, x_TH, weight, bias, self.columns), {}


class MLPRouter(nn.Module):
    """x [B, S, H] to (logits [T, E], the state [B, S, R] for the next router), as in ZAYA1 (Anthony et al. 2025).

    state = down(x) + scale * (state of the MoE layer before), logits = out(gelu(fc2(gelu(fc1(norm(state)))))). Between
    layers the state has the type of the stream, on one rank as on several."""

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MoEOptions, init: Initialisation):
        super().__init__()
        self.axis, self.columns = make.mesh.tensor, make.mesh.columns
        self.epsilon, H = model.norm.epsilon, model.hidden_size
        R, E = options.router.width, classes(options)

        def matrix(name: str, rows: int, columns: int) -> nn.Parameter:
            start, growth, stream = init.inside(columns, rows), Growth.OUTPUTS, None
            if name == "down":
                start, growth, stream = init.reads(columns, rows), Growth.INPUTS, 1
            return make.parameter(
                f"{name}.weight",
                (rows, columns),
                role=Role.ROUTER,
                init=start,
                keep_fp32=True,
                growth=growth,
                stream=stream,
            )

        def bias(name: str) -> nn.Parameter:
            return make.parameter(f"{name}.bias", (R,), role=Role.BIAS, init=ZEROS, keep_fp32=True)

        self.down, self.down_bias = matrix("down", R, H), bias("down")
        self.scale = None
        if options.router.average:
            self.scale = make.parameter("state_scale", (R,), role=Role.NORM, init=ONES, keep_fp32=True)
        self.norm = make.parameter("norm.weight", (R,), role=Role.NORM, init=ONES, keep_fp32=True)
        self.fc1, self.fc1_bias = matrix("fc1", R, R), bias("fc1")
        self.fc2, self.fc2_bias = matrix("fc2", R, R), bias("fc2")
        self.out = matrix("out", E, R)

    def forward(self, x_BSH: Tensor, stream: Stream) -> tuple[Tensor, dict[str, Tensor]]:
        shared = {name: sum_gradient(p, self.axis) for name, p in self.named_parameters(recurse=False)}
        state = over_columns(F.linear, at_least_fp32(x_BSH), shared["down"], shared["down_bias"], self.columns)
        if self.scale is not None:
            state = state + shared["scale"] * at_least_fp32(stream.channels[STATE])
        state = state.to(stream.hidden.dtype)
        h = F.rms_norm(at_least_fp32(state), state.shape[-1:], shared["norm"], self.epsilon)
        h = F.gelu(F.linear(h, shared["fc1"], shared["fc1_bias"]))
        h = F.gelu(F.linear(h, shared["fc2"], shared["fc2_bias"]))
        return F.linear(h, shared["out"]).flatten(0, 1), {STATE: state}


def router_counts(hidden_size: int, options: MoEOptions) -> tuple[int, int]:
    """(parameters, multiply-adds per token) of a router."""
    router, E = options.router, classes(options)
    if router.network == "linear":
        return sum(router_tensors(hidden_size, options)), hidden_size * E
    R = router.width
    products = hidden_size * R + 2 * R * R + R * E
    return products + 3 * R + R + (R if router.average else 0), products


def router_width(options: MoEOptions) -> int:
    """The outputs of the matrix that reads the stream."""
    return classes(options) if options.router.network == "linear" else options.router.width


def router_tensors(hidden_size: int, options: MoEOptions) -> list[int]:
    """The elements of each of a router's parameters, which every tensor parallel rank has whole."""
    router, E = options.router, classes(options)
    if router.network == "linear":
        vectors = [E] * (router.bias + router.expert_scale) + [hidden_size] * options.own_norms
        return [hidden_size * E, *vectors]
    R = router.width
    return [R * hidden_size, R, *([R] if router.average else []), R, R * R, R, R * R, R, E * R]

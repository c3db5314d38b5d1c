"""Options of the moe feed-forward: the experts, their choice, and their balance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from megatron.config.kind import LayerKind
from megatron.config.section import Derivable, Derived, Section, key
from megatron.kinds.common.options import MLP_WIDTH, Activation, mlp_width

from .rules import RULES, STACK_RULES

if TYPE_CHECKING:
    from megatron.config.derive import View


def _balance(own: dict[str, Any], at: View) -> float:
    """As in Switch and OLMoE, if no other option balances the load: otherwise a router collapses onto a few experts."""
    moe = at["model.moe"]
    evened = moe["router"]["select"] != "top_k" or moe["router"]["correction"] != "none" or own["sequence"] > 0
    return 0.0 if evened or moe["experts"] <= moe["top_k"] or not at.uses("moe") else 0.01


class RouterOptions(Section):
    network: Literal["linear", "mlp"] = key(
        "linear", "Network of a token's logits: one matrix, or a narrow state and a three-layer MLP on it (ZAYA1)."
    )
    width: int = key(256, "mlp: channels of the router's state and layers.", unit="channels", gt=0)
    average: bool = key(
        True, "mlp: add the previous MoE layer's router state, times a trained number per channel. The first has none."
    )
    skip: bool = key(False, "One more class, of tokens that use no expert (ZAYA1). Its correction stays at -1.")
    bias: bool = key(False, "linear: whether the router has a trained bias (BlackMamba).")
    expert_scale: bool = key(False, "The weights are multiplied by a trained number of each expert (Gemma 4).")
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = key(
        "softmax", "Function from logits to scores, in fp32. sqrt_softplus is DeepSeek-V4's."
    )
    select: Literal["top_k", "sinkhorn", "expert_choice", "hash"] = key(
        "top_k",
        "top_k: a token takes its best experts. sinkhorn: in training, the best after balancing the loads of the "
        "micro-batch (BlackMamba). expert_choice: an expert takes its best tokens (Zhou et al. 2022), which is not "
        "causal. hash: a fixed table gives the experts of each token id, and the scores only their weights (the first "
        "layers of DeepSeek-V4).",
    )
    normalize: bool = key(False, "Weights of a token's experts: scores over their sum (Mixtral), else scores (OLMoE).")
    scale: float = key(1.0, "The weights are multiplied by this (DeepSeek's routed_scaling_factor).", gt=0)
    groups: int = key(1, "Equal groups of experts. A token may choose from top_groups of them.", gt=0)
    top_groups: Derivable[int] = key(
        None,
        "Groups that a token may choose from: those with the largest group_score.",
        derived=Derived("model.moe.router.groups", lambda own, at: own["groups"], (".groups",)),
        gt=0,
    )
    group_score: Literal["top_two", "top_one"] = key(
        "top_two", "Score of a group: the sum of its two best experts' (DeepSeek-V3), or its best one's (DeepSeek-V2)."
    )
    correction: Literal["none", "sign"] = key(
        "none",
        "A bias on the scores that only choice sees, moved after each step by the load of the whole global batch: by a "
        "fixed amount towards the mean (DeepSeek-V3). No gradient, no auxiliary loss.",
    )
    correction_rate: float = key(1e-3, "How far the correction moves in a step.", ge=0)
    jitter: float = key(0.0, "In training uniform noise of 1 ± jitter multiplies router inputs (Switch).", ge=0, lt=1)
    sinkhorn_iterations: int = key(1, "sinkhorn: rounds of balancing.", gt=0)
    sinkhorn_start: Literal["load", "ones"] = key(
        "load", "sinkhorn: first column factors: one over each expert's sum (BlackMamba), or one (Megatron)."
    )


class AuxiliaryLossOptions(Section):
    balance: Derivable[float] = key(
        None,
        "Coefficient of the load balancing loss, per layer: experts / top_k * sum of load share * mean score, 1 where "
        "balanced (Fedus et al. 2022). Where nothing evens the load, most experts die within tens of steps.",
        derived=Derived(
            "0.01 where select is top_k, correction none and sequence 0, else 0",
            _balance,
            ("model.moe.router.select", "model.moe.router.correction", ".sequence"),
        ),
        ge=0,
    )
    over: Literal["micro_batch", "ranks"] = key(
        "micro_batch", "Loads of the balancing loss: of one rank's micro-batch, or of all data parallel ranks'."
    )
    sequence: float = key(0.0, "Coefficient of the same loss for each sequence by itself (DeepSeek-V2).", ge=0)
    z: float = key(0.0, "Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE).", ge=0)


class MoEOptions(Section):
    experts: int = key(8, "Number of routed experts.", gt=0)
    top_k: int = key(2, "Experts that a token uses (expert_choice: on average).", gt=0)
    hidden_size: Derivable[int] = key(
        None,
        "Width of one expert (each of gate and up has this width).",
        unit="channels",
        derived=Derived(MLP_WIDTH, mlp_width("moe"), ("model.hidden_size", ".gated")),
        gt=0,
    )
    latent_size: int | None = key(
        None,
        "Width of the space in which experts compute (latent mixture of experts, Nemotron 3). One matrix maps a token "
        "into it, another the weighted sum of experts back. Experts and their messages shrink by their ratio.",
        unit="channels",
        gt=0,
    )
    activation: Activation = key("silu", "Activation of the experts, as of model.mlp.")
    gated: bool = key(True, "Gated experts: activation(gate(x)) * up(x).")
    bias: bool = key(False, "Whether the matrices of the experts have biases (GPT-OSS).")
    limit: float | None = key(None, "gated: gate is at most this, and up within ± this (GPT-OSS).", gt=0)
    up_offset: float = key(0.0, "gated: added to up (GPT-OSS: 1).")
    shared_limit: float | None = key(None, "The same limit of the shared expert (DeepSeek-V4).", gt=0)
    shared_size: int = key(
        0,
        "Width of a shared expert that every token uses. Several shared experts are one of their summed width.",
        unit="channels",
        ge=0,
    )
    shared_gate: bool = key(False, "Scale the shared expert's output by the sigmoid of a trained number (Qwen2-MoE).")
    own_norms: bool = key(
        False,
        "The router, the experts and the shared expert multiply the normalised stream by vectors of their own, the "
        "router's over the root of its channels. The outputs of the experts and of the shared expert have a norm each "
        "before their sum (Gemma 4).",
    )
    capacity_factor: float | None = key(
        None,
        "Tokens that an expert takes, over an even share. The rest are dropped. None drops no token and computes no "
        "padding. A factor is for comparison.",
        gt=0,
    )
    router: RouterOptions = key(RouterOptions, "Choice of experts.")
    losses: AuxiliaryLossOptions = key(AuxiliaryLossOptions, "Losses on each layer's router, added to the model's.")


def _weights(options: MoEOptions, width: int) -> tuple[int, int]:
    latent = options.latent_size or width
    matrices = 2 * width * latent if options.latent_size else 0
    return matrices, options.experts * (3 if options.gated else 2) * latent * (options.hidden_size or 0)


KIND = LayerKind(
    role="ffn",
    options=MoEOptions,
    about="Options of the moe feed-forward: a mixture of experts.",
    layer="megatron.kinds.moe.layer:MoE",
    rules=RULES,
    stack_rules=STACK_RULES,
    linears=lambda options: (
        ("shared.gate_up" if options.gated else "shared.up", "shared.down") if options.shared_size else ()
    ),
    keeps_fp32=True,
    scales_input=lambda options: options.own_norms,
    draws=lambda options: options.router.jitter > 0.0,
    experts=lambda options: options.experts,
    weights=_weights,
    mixes_samples=lambda options: options.capacity_factor is not None or options.router.select == "expert_choice",
    keeps_buffers=lambda options: options.router.correction != "none" or options.router.select == "hash",
    context="alone",
    columns=True,
    fetches="megatron.kinds.moe.fetched:Fetching",
    stays="megatron.kinds.moe.staying:Staying",
)

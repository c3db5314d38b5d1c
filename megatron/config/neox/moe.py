"""GPT-NeoX's keys of mixtures of experts, with the meaning that its dropless layer gives them, and of muP."""

from typing import Any

from .reader import Flat, Native

# Key -> GPT-NeoX's default.
MUP: dict[str, Any] = {"use_mup": False, "mup_init_scale": 1.0, "mup_embedding_mult": 1.0}
KEYS: dict[str, Any] = {
    "moe_num_experts": 1,
    "moe_expert_interval": 1,
    "moe_top_k": 1,
    "moe_router_type": "sinkhorn",
    "moe_jitter_eps": None,
    **MUP,
}
ROUTERS = {"sinkhorn": "sinkhorn", "topk": "top_k"}

# GPT-NeoX's Sinkhorn runs three rounds. It means to stop when the column factors settle, but asks the wrong way round.
# From some thousand tokens on they are smaller than its tolerance.
ROUNDS = 3
WIDTH_MULTIPLE = 256  # of experts without a stated width, whatever mlp_multiple_of says


def translate(flat: Flat, native: Native) -> None:
    """Translate the keys, after the topics of the model and the layout."""
    _moe(flat, native)
    _mup(flat, native)


def _moe(flat: Flat, native: Native) -> None:
    experts = flat.defaulted_count("moe_num_experts") if flat.raw("moe_num_experts") != 0 else 1
    if experts == 1:
        native.unused("at a value that changes nothing", "moe_num_experts")
        others = (name for name in KEYS if name not in ("moe_num_experts", *MUP))
        native.unused("no layer reads it: mixture of experts is off", *others)
        return
    native.put("model.moe.experts", experts, "moe_num_experts")
    native.put("model.moe.top_k", flat.count("moe_top_k"), "moe_top_k")
    _layers(flat, native)
    _experts(flat, native)
    _router(flat, native)
    _ranks(flat, native, experts)
    if flat.boolean("gpt_j_residual"):
        native.note(
            "gpt_j_residual with experts: attention and experts are both added to the stream. GPT-NeoX drops the "
            "attention output here"
        )
    if flat.number("hidden_dropout"):
        native.note("model.dropout: applied to the experts' output too. GPT-NeoX skips it")


def _layers(flat: Flat, native: Native) -> None:
    """Layers whose number, from 0, the interval divides have experts."""
    layers, interval = flat.count("num_layers"), flat.count("moe_expert_interval")
    if not layers or not interval:
        return
    dense = f" attention/mlp x{interval - 1}" if interval > 2 else " attention/mlp" * (interval - 1)
    groups, rest = divmod(layers, interval)
    parts = [f"(attention/moe{dense}) x{groups}"] if groups else []
    if rest:
        parts.append("attention/moe")
    if rest > 1:
        parts.append(f"attention/mlp x{rest - 1}")
    native.put(
        "model.layers", " ".join(parts), "num_layers", "moe_num_experts", "moe_expert_interval", "attention_config"
    )


def _experts(flat: Flat, native: Native) -> None:
    """Experts have no biases and do not read expansion_factor or mlp_multiple_of."""
    mlp = native.result.values["model"]["mlp"]
    llama = flat.choice("mlp_type", {"regular": False, "llama": True}) or False
    if mlp["gated"] and not llama:
        flat.problem(
            "activation",
            "GPT-NeoX's experts are not gated: it fails with this activation",
            "take gelu, silu or relu, or the native model.moe.gated",
        )
    if flat.given("expansion_factor"):
        flat.problem("expansion_factor", "GPT-NeoX's experts do not read it", "say their width in intermediate_size")
    if mlp["activation"] == "gelu_tanh":
        native.note("model.moe.activation: gelu, exact, since bias_gelu_fusion is of MLPs, whose biases experts lack")
    native.put("model.moe.activation", mlp["activation"].removesuffix("_tanh"), "activation")
    native.put("model.moe.gated", llama, "mlp_type", "activation")
    hidden = flat.count("hidden_size")
    if hidden:
        usual = int(2 * hidden * 4 / 3) if llama else 4 * hidden
        width = flat.count("intermediate_size") or -(-usual // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        native.put("model.moe.hidden_size", width, "intermediate_size", "hidden_size")


def _router(flat: Flat, native: Native) -> None:
    kind, top_k = flat.choice("moe_router_type", ROUTERS) or "sinkhorn", flat.count("moe_top_k")
    native.put("model.moe.router.select", kind, "moe_router_type")
    if kind == "sinkhorn":
        native.put("model.moe.router.score", "sigmoid" if top_k == 1 else "softmax", "moe_router_type", "moe_top_k")
        native.put("model.moe.router.sinkhorn_iterations", ROUNDS, "moe_router_type")
        native.put("model.moe.router.sinkhorn_start", "load", "moe_router_type")
        native.unused("the sinkhorn router does not read it", "moe_jitter_eps")
    else:
        native.put("model.moe.router.score", "softmax", "moe_router_type")
        native.put("model.moe.losses.balance", 0.0, "moe_router_type")
        native.note(
            "model.moe.losses: none, as in GPT-NeoX. With moe_router_type topk nothing evens the load: give "
            "model.moe.losses.balance or model.moe.router.correction: sign"
        )
        if jitter := flat.number("moe_jitter_eps"):
            native.put("model.moe.router.jitter", float(jitter), "moe_jitter_eps")
    native.note("model.moe.router: its weights and scores are fp32. GPT-NeoX has them in the type of the model")


def _ranks(flat: Flat, native: Native, experts: int) -> None:
    """GPT-NeoX gives each tensor parallel rank whole experts."""
    ranks = flat.count("model_parallel_size")
    if ranks and ranks > 1:
        if experts % ranks:
            flat.problem(
                "moe_num_experts",
                f"each of the {ranks} tensor parallel ranks has the same number of whole experts",
                f"use a multiple of {ranks}",
            )
        native.put("parallel.expert", ranks, "model_parallel_size", "moe_num_experts")
        native.put("parallel.expert_tensor", 1, "model_parallel_size", "moe_num_experts")


def _mup(flat: Flat, native: Native) -> None:
    """Follows GPT-NeoX's intent, not its computation. There the schedule overwrites the rates of muP, only one of the
    attention implementations divides by the head dimension, and the embedding multiplier has no gradient."""
    if not flat.boolean("use_mup"):
        native.unused("at a value that changes nothing", "use_mup")
        native.unused("use_mup is off", "mup_init_scale", "mup_embedding_mult")
        return
    native.put("model.parametrization.type", "mup", "use_mup")
    native.put("model.parametrization.base_head_dim", 1, "use_mup")
    std = float(flat.number("init_method_std") or 0.02) * float(flat.number("mup_init_scale") or 1.0)
    native.put("model.init.std", std, "init_method_std", "mup_init_scale")
    native.put("model.embedding.multiplier", float(flat.number("mup_embedding_mult") or 1.0), "mup_embedding_mult")
    native.note(
        "use_mup: the width of the base model is in the file of base shapes, which is not read: give it as "
        "model.parametrization.base_width. The rates of muP hold during the whole schedule, attention is divided by "
        "the head dimension, and the embedding's multiplier has its gradient. GPT-NeoX loses all three"
    )

"""Random configurations over all kinds of layers and their options, random layouts, and random mistakes.

All a function of a seed. A draw may contradict a rule. `legal` then draws again.
"""

from __future__ import annotations

import random
from typing import Any

from megatron.config import ConfigError, resolve
from tests.training.matrix import merged

WIDTH, STEPS = 32, 3
FFNS = ["mlp", "mlp", "moe"]


def configuration(seed: int, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A model of two to four blocks of any kinds, its recipe, and no layout.

    Args:
        without: words that the names of its layers do not have.
    """
    draw, drawn = random.Random(seed), 0
    while drawn < 100:
        values = _drawn(draw)
        if any(word in values["model"]["layers"] for word in without):
            continue
        drawn += 1
        if refused(values, 1) is None:
            return values
    raise AssertionError(f"seed {seed}: a hundred draws were refused, the last so: {refused(values, 1)}")


def layout(draw: random.Random, values: dict[str, Any], stepped: bool = False) -> tuple[dict[str, Any], int]:
    """A legal layout of one to four ranks: what is merged over the configuration, and the number of ranks."""
    for _ in range(200):
        ranks, tensor, pipeline = draw.choice([2, 2, 3, 4, 4]), draw.choice([1, 1, 2, 2, 4]), draw.choice([1, 1, 2, 3])
        parallel = {"tensor": tensor, "pipeline": pipeline}
        if tensor > 1:
            parallel["sequence"] = draw.random() < 0.5
        if pipeline > 1:
            parallel["pipeline_split"] = draw.choice(["parameters", "uniform"])
        if draw.random() < 0.4:
            parallel |= {"context": draw.choice([2, 4]), "context_method": draw.choice(["auto", "ulysses", "gather"])}
        if "moe" in values["model"]["layers"] and draw.random() < 0.5:
            parallel["expert"] = draw.choice([1, 2, 4])
            if tensor > 1 and draw.random() < 0.5:
                parallel["expert_tensor"] = 1
        cut = {
            "parallel": parallel,
            "zero": {
                "stage": draw.choice([0, 1, 2, 3]),
                "persistent_size": draw.choice([0, 100, 100_000]),
                "bucket_size": draw.choice([1000, 500_000_000]),
            },
            "training": {
                "micro_batch_size": draw.choice([1, 2, 4]),
                "activation_checkpointing": {"mode": draw.choice(["none", "none", "full", "selective"])},
            },
        }
        if refused(merged(values, cut), ranks) is None:
            return cut, ranks
    return {"zero": {"stage": 1}}, 1


def folded_layout(draw: random.Random, values: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A legal layout of two to four ranks that share the rows of matrices."""
    for _ in range(200):
        ranks, folded = draw.choice([2, 4, 4]), draw.choice([2, 2, 4])
        parallel = {"folded": folded, "pipeline": draw.choice([1, 1, 2])}
        parallel["context_method"] = draw.choice(["auto", "ring", "gather"])
        if "moe" in values["model"]["layers"]:
            parallel["expert"] = folded
        cut = {
            "parallel": parallel,
            "zero": {"stage": draw.choice([0, 1, 2]), "bucket_size": draw.choice([1000, 500_000_000])},
            "training": {
                "micro_batch_size": draw.choice([1, 2, 4]),
                "activation_checkpointing": {"mode": draw.choice(["none", "full"])},
            },
        }
        if refused(merged(values, cut), ranks) is None:
            return cut, ranks
    return {"zero": {"stage": 1}}, 1


def sequence_layout(draw: random.Random, values: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A legal layout of two to four ranks that share sequences: by any method and cut, whole or in chunks."""
    for _ in range(400):
        context, tensor = draw.choice([2, 2, 3, 4, 4]), draw.choice([1, 1, 2])
        ranks = context if context > 2 else draw.choice([2, 4, 4])
        parallel = {
            "context": context,
            "context_method": draw.choice(["auto", "ulysses", "ring", "nested", "gather"]),
            "context_cut": draw.choice(["auto", "contiguous", "zigzag"]),
            "tensor": tensor,
            "pipeline": draw.choice([1, 1, 1, 2]),
            "sequence": tensor > 1 and draw.random() < 0.5,
        }
        if "moe" in values["model"]["layers"]:
            parallel["expert"] = draw.choice([1, 2, 4])
        cut = {
            "parallel": parallel,
            "zero": {"stage": draw.choice([0, 1, 2, 3]), "bucket_size": draw.choice([1000, 500_000_000])},
            "training": {
                "micro_batch_size": draw.choice([1, 2, 4]),
                "sequence_chunks": draw.choice([1, 1, 2, 3]),
                "activation_checkpointing": {"mode": draw.choice(["none", "full", "selective"])},
            },
        }
        if refused(merged(values, cut), ranks) is None:
            return cut, ranks
    return {"zero": {"stage": 1}}, 1


def mutation(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one number or word replaced by another that may or may not be allowed there."""
    places = [path for path in _leaves(values) if path[0] in ("model", "training", "optimizer")]
    path = draw.choice(places)
    old = values
    for name in path:
        old = old[name]
    if isinstance(old, bool):
        new = draw.choice([not old, "yes and no", 3])
    elif isinstance(old, int | float):
        new = draw.choice([0, -1, 1, 3, 5, 7, old * 2, old + 1, old / 2, "many", None, float("inf")])
    else:
        new = draw.choice(["", "nothing", 7, str(old) + " x2", None, ["mlp"]])
    over: Any = new
    for name in reversed(path):
        over = {name: over}
    return merged(values, over)


def refused(values: dict[str, Any], ranks: int) -> str | None:
    """Why a configuration is refused. None if it is not."""
    try:
        resolve(values, ranks=ranks)
    except ConfigError as error:
        return str(error)
    return None


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()):
    for name, value in tree.items():
        yield from _leaves(value, (*path, name)) if isinstance(value, dict) else [(*path, name)]


def _drawn(draw: random.Random) -> dict[str, Any]:
    kinds = {name: make(draw) for name, make in MIXERS.items()}
    norm = draw.choice(["layernorm", "rmsnorm"])
    model = {
        "layers": _pattern(draw),
        "hidden_size": WIDTH,
        "vocab_size": draw.choice([96, 99, 101]),
        "norm": {"type": norm, "epsilon": draw.choice([1e-5, 1e-3]), "unit_offset": draw.random() < 0.2},
        "residual": draw.choice([
            {},
            {"form": "parallel", "shared_norm": draw.random() < 0.5},
            {"norm": draw.choice(["post", "hybrid", "both"])},
            {"multiplier": 0.5},
            {"channel_scales": True},
        ]),
        "embedding": {
            "tied": draw.random() < 0.3,
            "norm": draw.random() < 0.3,
            "position": draw.choice(["none", "none", "learned"]),
            "multiplier": draw.choice([1.0, 1.7]),
        },
        "head": {
            "bias": draw.random() < 0.3,
            "softcap": draw.choice([None, None, 8.0]),
            "multiplier": draw.choice([1.0, 1.0, 0.7]),
        },
        "dropout": draw.choice([0.0, 0.0, 0.1]),
        "init": {"std": 0.15, "output": "normal"},
        "mlp": _mlp(draw),
        "moe": _moe(draw),
        **{f"rwkv{version}_ffn": {"init": "model"} for version in (4, 5, 6, 7)},
        **kinds,
    }
    words = {word for block in model["layers"].split() for word in block.replace("+", "/").split("/")}
    used = {word.split("@")[0] for word in words}
    own = {"local": {"window": 3}, "plain": {"query_rank": None, "position": "none"}, "first": FIRST}
    variants = {name: own[name] for word in sorted(words) for name in word.split("@")[1:]}
    if variants:
        model["variants"] = variants
    model = {name: value for name, value in model.items() if name not in {*MIXERS, *FFN_NAMES} or name in used}
    training = {"steps": STEPS, "sequence_length": 12, "micro_batch_size": 2, "global_batch_size": 8}
    training |= {
        "seed": draw.randint(1, 1000),
        "z_loss": draw.choice([0.0, 0.01]),
        "loss_chunk": draw.choice([0, 10, 64]),
    }
    optimizer = draw.choice(OPTIMIZERS) | {"weight_decay": 0.1, "gradient_clipping": 0.5}
    if draw.random() < 0.25:
        model["parametrization"] = draw.choice(PARAMETRIZATIONS)
    return {
        "model": model,
        "training": training,
        "optimizer": optimizer,
        "data": {"synthetic": "copy", "reset_attention_at_eod": draw.random() < 0.4},
    }


def _pattern(draw: random.Random) -> str:
    """Two to four blocks. The first experts are a variant, whose router sees no state of a router before it."""
    return " ".join(_block(draw) for _ in range(draw.randint(2, 4))).replace("moe", "moe@first", 1)


def _block(draw: random.Random) -> str:
    mixer = draw.choice([*list(MIXERS)[:-1], "attention@local", "cca@local", "mla@plain"])
    if mixer.startswith("rwkv") and draw.random() < 0.7:
        return f"{mixer}/{mixer}_ffn"
    if mixer in ("mamba", "mamba2"):
        beside = "+shared_attention" if draw.random() < 0.3 else ""
        return f"{mixer}{beside}" + draw.choice(["", "/mlp", "/moe"])
    return f"{mixer}/{draw.choice(FFNS)}" if draw.random() < 0.9 else draw.choice([mixer, *FFNS])


def _attention(draw: random.Random) -> dict[str, Any]:
    position = draw.choice(["rotary", "rotary", "alibi", "none"])
    return {
        "heads": 4,
        "kv_heads": draw.choice([1, 2, 4]),
        "position": position,
        **({"rotary": {"fraction": draw.choice([0.5, 1.0])}} if position == "rotary" else {}),
        "window": draw.choice([None, 5]),
        "qk_norm": draw.choice(["none", "head", "full"]),
        "softcap": draw.choice([None, None, 5.0]),
        "sinks": draw.random() < 0.3,
        "qkv_bias": draw.random() < 0.5,
        "output_bias": draw.random() < 0.5,
        "dropout": draw.choice([0.0, 0.0, 0.1]),
    }


def _mlp(draw: random.Random) -> dict[str, Any]:
    activation = draw.choice(["gelu", "gelu_tanh", "silu", "relu", "relu2"])
    return {"hidden_size": 48, "gated": draw.random() < 0.5, "bias": draw.random() < 0.5, "activation": activation}


def _moe(draw: random.Random) -> dict[str, Any]:
    gated, shared = draw.random() < 0.7, draw.choice([0, 16])
    limits = {"limit": 0.7, "up_offset": 1.0, "activation": "quick_gelu"} if gated and draw.random() < 0.3 else {}
    return {
        "experts": draw.choice([4, 8]),
        "top_k": draw.choice([1, 2, 3]),
        "hidden_size": 16,
        "gated": gated,
        "bias": draw.random() < 0.3,
        **limits,
        "shared_size": shared,
        "shared_gate": bool(shared) and draw.random() < 0.5,
        "router": _router(draw),
        # the balancing loss is one of a micro-batch, so that layouts differ in it
        "losses": {"balance": 0.0, "sequence": draw.choice([0.0, 0.1]), "z": draw.choice([0.0, 0.05])},
    }


def _router(draw: random.Random) -> dict[str, Any]:
    """Omitted: choices of sinkhorn and expert_choice, and jitter, which depend on the micro-batch."""
    own = {
        "score": draw.choice(["softmax", "sigmoid"]),
        "normalize": draw.random() < 0.5,
        "scale": draw.choice([1.0, 1.5]),
        "correction": draw.choice(["none", "sign"]),
    }
    if draw.random() < 0.3:
        own |= {"groups": 4, "top_groups": draw.choice([2, 3]), "group_score": draw.choice(["top_one", "top_two"])}
    if draw.random() < 0.3:
        return own | {"network": "mlp", "width": 12, "average": draw.random() < 0.5, "skip": draw.random() < 0.5}
    return own | {"bias": draw.random() < 0.3}


def _mamba(draw: random.Random) -> dict[str, Any]:
    own = {"state_size": 4, "chunk": draw.choice([5, 16]), "bias": draw.random() < 0.5, "heads": draw.choice([1, 2, 4])}
    return own | {"inner_norms": draw.random() < 0.3, "rank": 4, "convolution_bias": draw.random() < 0.5, **TIMES}


def _mamba2(draw: random.Random) -> dict[str, Any]:
    own = {"head_dim": 8, "state_size": 8, "groups": draw.choice([1, 2, 4]), "chunk": draw.choice([5, 16])}
    own |= {"inner_size": draw.choice([None, 96]), "most_step": draw.choice([None, 0.8])}
    return own | {"bias": draw.random() < 0.5, "convolution_bias": draw.random() < 0.5, **TIMES}


def _gated_delta(draw: random.Random) -> dict[str, Any]:
    own = {"heads": 4, "key_heads": draw.choice([2, 4]), "key_dim": 8, "value_dim": 8, "chunk": draw.choice([5, 16])}
    own |= {"negative_eigenvalues": draw.random() < 0.5, "convolution_bias": draw.random() < 0.5}
    return own | {"norm_epsilon": 0.01, "decay_low": 0.5, "decay_high": 2.0, **TIMES}


def _cca(draw: random.Random) -> dict[str, Any]:
    own = {"heads": 8, "kv_heads": draw.choice([2, 4]), "head_dim": 4, "depthwise": draw.choice([2, 3]), "grouped": 2}
    own |= {"temperature": draw.choice(["exponential", "linear"]), "window": draw.choice([None, 5])}
    return own | {"qkv_bias": draw.random() < 0.5, "output_bias": draw.random() < 0.5}


def _mla(draw: random.Random) -> dict[str, Any]:
    own = {"heads": 4, "kv_rank": draw.choice([6, 10]), "nope_dim": draw.choice([3, 6]), "rope_dim": 4, "value_dim": 8}
    own |= {"query_rank": draw.choice([None, 12]), "position": draw.choice(["rotary", "none"])}
    return own | {"bias": draw.random() < 0.5}


def _rwkv(draw: random.Random, version: int) -> dict[str, Any]:
    own = {"chunk": draw.choice([5, 16]), "init": "model", **({} if version == 4 else {"head_dim": 8})}
    if version == 6:
        own |= {"mix_rank": 4, "decay_rank": 4}
    if version == 7:
        own |= {f"{name}_rank": 4 for name in ("decay", "rate", "value", "gate")}
    return own


def _shared(draw: random.Random) -> dict[str, Any]:
    own = {"heads": 4, "kv_heads": draw.choice([2, 4]), "blocks": draw.choice([1, 2]), "mlp": {"hidden_size": 40}}
    return own | {"adapter_rank": draw.choice([0, 3]), "attention_adapters": draw.random() < 0.3}


TIMES = {"time_step_low": 0.3, "time_step_high": 1.0}
MIXERS = {
    "attention": _attention,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "gated_delta": _gated_delta,
    "cca": _cca,
    "mla": _mla,
    **{f"rwkv{version}": lambda draw, version=version: _rwkv(draw, version) for version in (4, 5, 6, 7)},
    "shared_attention": _shared,
}
OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "sgd", "lr": 0.3, "momentum": 0.9},
    {"type": "sgd", "lr": 0.3, "momentum": 0.9},
    {"type": "adamw", "lr": 0.01, "epsilon": 1e-3},
    {"type": "ademamix", "lr": 0.01, "epsilon": 1e-3, "options": {"alpha": 3.0, "slow": 0.99, "warmup": 2}},
    {"type": "muon", "lr": 0.01, "muon_lr": 0.02, "epsilon": 1e-3},
    {"type": "soap", "lr": 0.01, "epsilon": 1e-3, "options": {"frequency": 2}},
]
PARAMETRIZATIONS: list[dict[str, Any]] = [
    {"type": "mup", "base_width": 16},
    {"type": "completep", "base_width": 16, "base_depth": 2},
]
FIRST = {"router": {"average": False}}
FFN_NAMES = ["mlp", "moe", *(f"rwkv{version}_ffn" for version in (4, 5, 6, 7))]

"""GPT-NeoX's model keys."""

from itertools import groupby
from typing import Any

from .reader import Flat, Native

# Key -> GPT-NeoX's default.
KEYS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "num_layers hidden_size num_attention_heads num_kv_heads max_position_embeddings intermediate_size "
            "expansion_factor attention_config sliding_window_width"
        ).split()
    ),
    "mlp_multiple_of": 1,
    "no_weight_tying": False,
    "gpt_j_residual": False,
    "gpt_j_tied": False,
    "use_bias_in_attn_linear": True,
    "use_bias_in_mlp": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "activation": "gelu",
    "bias_gelu_fusion": False,
    "init_method": "normal",
    "output_layer_init_method": "scaled_normal",
    "init_method_std": 0.02,
    "norm": "layernorm",
    "layernorm_epsilon": 1e-05,
    "rms_norm_epsilon": 1e-08,
    "pos_emb": "learned",
    "rotary_pct": 1.0,
    "rotary_emb_base": 10000,
    "make_vocab_size_divisible_by": 128,
    "mamba_selective_fp32_params": True,
    "mamba_use_bias_in_conv": True,
    "mamba_use_bias_in_linears": False,
}

# activation -> (native activation, gated)
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "relu": ("relu", False),
    "silu": ("silu", False),
    "swish": ("silu", False),
    "geglu": ("gelu", True),
    "reglu": ("relu", True),
    "swiglu": ("silu", True),
    "bilinear": ("identity", True),
}
NO_ACTIVATION = dict.fromkeys(("softsign", "mish"), "take gelu, relu or silu") | {
    "glu": "the sigmoid gate is not one of the gated forms here: take swiglu, geglu, reglu or bilinear"
}

# norm -> (native norm, key of its epsilon)
NORMS = {
    "layernorm": ("layernorm", "layernorm_epsilon"),
    "te_layernorm": ("layernorm", "layernorm_epsilon"),
    "rmsnorm": ("rmsnorm", "rms_norm_epsilon"),
    "te_rmsnorm": ("rmsnorm", "rms_norm_epsilon"),
    "non_parametric_layernorm": ("nonparametric", "layernorm_epsilon"),
}
NO_NORM = {"scalenorm": "take rmsnorm, which differs by a weight per channel instead of one in all"}

# pos_emb -> (position in the embedding, position in attention)
POSITIONS = {
    "learned": ("learned", "none"),
    "rotary": ("none", "rotary"),
    "alibi": ("none", "alibi"),
    "none": ("none", "none"),
}
NO_POSITION = {
    "sinusoidal": "fixed sinusoids are not available: take learned, rotary, alibi or none",
    "rpe": "T5's relative position buckets are not available: take alibi, rotary, learned or none",
}

_SCHEMES = "normal scaled_normal single_residual_scaled_normal small_init wang_init xavier_uniform xavier_normal"
INITS = {name: name for name in _SCHEMES.split()}
NO_INIT = {
    "orthogonal": "GPT-NeoX fails with it too: take normal here, or set model.init natively",
    "scaled_orthogonal": "GPT-NeoX fails with it too: take scaled_normal here, or set model.init natively",
}

SPARSE = "block-sparse attention is not available: take global attention with sliding_window_width"
NO_ATTENTION = dict.fromkeys(("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer"), SPARSE) | {
    "gmlp": "gMLP layers are not available: take flash or global",
    "amlp": "aMLP layers are not available: take flash or global",
    "rwkv": "name them natively: rwkv6/rwkv6_ffn in model.layers, model.rwkv6.head_dim = dim_att / "
    "num_attention_heads, model.rwkv6_ffn.hidden_size = 3.5 hidden_size, model.embedding.norm: true, as in "
    "configs/rwkv6. They are not translated because GPT-NeoX's RWKV uses one norm twice in its first layer, where RWKV "
    "has two",
}

# attention_config -> the layer
KINDS = {"global": "attention/mlp", "flash": "attention/mlp", "mamba": "mamba"}

# From this many times hidden_size on, intermediate_size of a gated MLP is GPT-NeoX's width before gating.
BEFORE_GATING = 6


def translate(flat: Flat, native: Native) -> None:
    """Translate the model keys."""
    flat.require("num_layers", "the number of transformer layers")
    flat.require("hidden_size", "the width of the residual stream")
    flat.require("num_attention_heads", "the number of query heads")
    if hidden := flat.count("hidden_size"):
        native.put("model.hidden_size", hidden, "hidden_size")
    _stack(flat, native)
    _vocabulary(flat, native)
    _norm(flat, native)
    _positions(flat, native)
    _attention(flat, native)
    _mlp(flat, native, hidden)
    _residual(flat, native)
    _inits(flat, native)


def _stack(flat: Flat, native: Native) -> None:
    layers = flat.count("num_layers")
    if not layers:
        return
    native.put("model.layers", f"(attention/mlp) x{layers}", "num_layers", "attention_config")
    config = flat.items("attention_config")
    if config is None:
        _mamba(flat, native, [])
        return
    kinds = expand(config, layers)
    if kinds is None or len(kinds) != layers:
        found = "it cannot be read" if kinds is None else f"it has {len(kinds)}"
        flat.problem(
            "attention_config",
            f"attention_config must name {layers} layers (num_layers), and {found}",
            f'write [[["flash"], {layers}]] or [[["flash"], "all"]]',
        )
        return
    _mamba(flat, native, kinds)
    for kind in sorted(set(map(str, kinds)) - set(KINDS)):
        flat.problem(
            "attention_config",
            "attention kinds here are global and flash, which compute the same, and mamba",
            NO_ATTENTION.get(kind, "take flash or global"),
            value=kind,
        )


def _pattern(kinds: list) -> str:
    """The stack of these kinds, with runs of one kind as one word: (attention/mlp) x2 mamba x3."""
    runs = [(word, len([*group])) for word, group in groupby(KINDS.get(str(kind), "attention/mlp") for kind in kinds)]
    return " ".join(f"{f'({word})' if '/' in word else word} x{count}" for word, count in runs)


def _mamba(flat: Flat, native: Native, kinds: list) -> None:
    """A layer of kind mamba is one residual branch with a norm, without an MLP of its own, in the fixed sizes of Mamba.

    16 state elements per channel, a convolution over 4 tokens, time steps of rank hidden_size / 16, two inner channels
    per channel unless intermediate_size or expansion_factor say otherwise."""
    names = ("mamba_selective_fp32_params", "mamba_use_bias_in_conv", "mamba_use_bias_in_linears")
    if "mamba" not in kinds:
        native.unused("no layer is of kind mamba", *names)
        return
    native.put("model.layers", _pattern(kinds), "attention_config", "num_layers")
    if not flat.boolean("mamba_selective_fp32_params"):
        flat.problem("mamba_selective_fp32_params", "A_log and D are kept in fp32 here on every layout", "remove it")
    if flat.boolean("mamba_use_bias_in_linears"):
        flat.problem(
            "mamba_use_bias_in_linears",
            "GPT-NeoX then gives x_proj a bias too, which Mamba layers here do not have",
            "remove it, or take the native model.mamba.bias: true, only for in_proj and out_proj",
        )
    native.used.update(names)
    native.put("model.mamba.convolution_bias", flat.boolean("mamba_use_bias_in_conv"), "mamba_use_bias_in_conv")
    hidden = flat.count("hidden_size") or 0
    inner = _stated_width(flat, hidden) if hidden else None
    if inner and inner % hidden:
        flat.problem(
            "intermediate_size",
            f"the inner width of Mamba layers ({inner}) must be a multiple of hidden_size ({hidden})",
            f"take {2 * hidden}, which is Mamba's",
        )
        return
    native.put("model.mamba.expand", inner // hidden if inner else 2, "intermediate_size", "expansion_factor")
    native.put("model.mamba.state_size", 16, "attention_config")


def expand(config: list, layers: int) -> list | None:
    """GPT-NeoX's attention_config, a list of (kinds, repeats or "all") or of kinds, as one kind per layer.

    Returns None for what is neither."""
    if all(isinstance(item, str) for item in config):
        return list(config)
    kinds: list = []
    for item in config:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and item[0]):
            return None
        group, repeats = item
        if repeats == "all":
            if layers % len(group):
                return None
            repeats = layers // len(group)
        if not isinstance(repeats, int):
            return None
        kinds += group * repeats
    return kinds


def _vocabulary(flat: Flat, native: Native) -> None:
    multiple = flat.defaulted_count("make_vocab_size_divisible_by")
    tensor = flat.defaulted_count("model_parallel_size")
    native.put("model.vocab_multiple", multiple * tensor, "make_vocab_size_divisible_by", "model_parallel_size")


def _norm(flat: Flat, native: Native) -> None:
    kind, epsilon = flat.choice("norm", NORMS, NO_NORM) or NORMS["layernorm"]
    native.put("model.norm.type", kind, "norm")
    native.put("model.norm.epsilon", flat.defaulted_number(epsilon), epsilon)
    if kind == "layernorm":
        native.put("model.norm.bias", True, "norm")
    if kind == "rmsnorm" and not flat.given("rms_norm_epsilon"):
        native.note("model.norm.epsilon: 1.0e-08 is GPT-NeoX's default rms_norm_epsilon. Llama uses 1.0e-05 or 1.0e-06")
    native.unused("of a norm that is not used", *({"layernorm_epsilon", "rms_norm_epsilon"} - {epsilon}))


def _positions(flat: Flat, native: Native) -> None:
    embedding, attention = flat.choice("pos_emb", POSITIONS, NO_POSITION) or ("none", "none")
    native.put("model.embedding.position", embedding, "pos_emb")
    native.put("model.attention.position", attention, "pos_emb")
    positions, length = flat.count("max_position_embeddings"), flat.count("seq_length")
    if positions and length and positions < length:
        flat.problem("max_position_embeddings", f"must be at least seq_length ({length})", f"set it to {length}")
    if embedding == "learned":
        flat.require("max_position_embeddings", "the number of learned positions")
        native.put("model.embedding.max_positions", positions, "max_position_embeddings")
    else:
        native.unused("only learned positions have a table", "max_position_embeddings")
    if attention == "rotary":
        native.put("model.attention.rotary.fraction", flat.defaulted_number("rotary_pct"), "rotary_pct")
        native.put("model.attention.rotary.base", flat.defaulted_number("rotary_emb_base"), "rotary_emb_base")
    else:
        native.unused("pos_emb is not rotary", "rotary_pct", "rotary_emb_base")


def _attention(flat: Flat, native: Native) -> None:
    if heads := flat.count("num_attention_heads"):
        native.put("model.attention.heads", heads, "num_attention_heads")
    if kv_heads := flat.integer("num_kv_heads"):
        native.put("model.attention.kv_heads", kv_heads, "num_kv_heads")
    bias = flat.boolean("use_bias_in_attn_linear")
    native.put("model.attention.qkv_bias", bias, "use_bias_in_attn_linear")
    native.put("model.attention.output_bias", bias, "use_bias_in_attn_linear")
    native.put("model.attention.dropout", flat.defaulted_number("attention_dropout"), "attention_dropout")
    window = flat.count("sliding_window_width")
    if window is not None:
        native.put("model.attention.window", window + 1, "sliding_window_width")
        native.note(
            f"model.attention.window: {window + 1}, because with sliding_window_width {window} GPT-NeoX lets a "
            f"token attend to itself and to the {window} before it"
        )


def _mlp(flat: Flat, native: Native, hidden: int | None) -> None:
    activation, gated = flat.choice("activation", ACTIVATIONS, NO_ACTIVATION) or ("gelu", False)
    llama = flat.choice("mlp_type", {"regular": False, "llama": True}) or False
    gated = gated or llama
    fused = flat.boolean("bias_gelu_fusion") and activation == "gelu" and not gated
    if fused:
        activation = "gelu_tanh"
        native.note(
            "model.mlp.activation: gelu_tanh, because bias_gelu_fusion computes the tanh approximation of "
            "gelu. Published Hugging Face configurations of such models (Pythia) say gelu, the exact form"
        )
    else:
        native.unused("the plain activation is computed", "bias_gelu_fusion")
    native.put("model.mlp.activation", activation, "activation", *(["bias_gelu_fusion"] if fused else []))
    native.put("model.mlp.gated", gated, "activation", "mlp_type")
    bias = flat.boolean("use_bias_in_mlp") and not (llama and not flat.given("use_bias_in_mlp"))
    native.put("model.mlp.bias", bias, "use_bias_in_mlp", "mlp_type")
    if gated and bias and not flat.given("use_bias_in_mlp"):
        native.note("model.mlp.bias: true, GPT-NeoX's default for gated MLPs too. Llama has use_bias_in_mlp: false")
    if hidden:
        width = _gated_width(flat, native, hidden, llama) if gated else _plain_width(flat, hidden)
        native.put(
            "model.mlp.hidden_size", width, "intermediate_size", "expansion_factor", "mlp_multiple_of", "mlp_type"
        )


def _stated_width(flat: Flat, hidden: int) -> int | None:
    """intermediate_size, or expansion_factor times hidden_size, or None if neither is given."""
    size, factor = flat.count("intermediate_size"), flat.number("expansion_factor")
    if size and factor:
        flat.problem("expansion_factor", "GPT-NeoX takes it or intermediate_size, not both", "remove one of them")
    return size or (int(factor * hidden) if factor else None)


def _up(width: int, multiple: int) -> int:
    return multiple * -(-width // multiple)


def _third(width: int, multiple: int) -> int:
    """The gated width that GPT-NeoX since 2024-09 builds: half of two thirds, rounded up to the multiple."""
    return _up(-(-int(width * 2 / 3) // 2), multiple)


def _plain_width(flat: Flat, hidden: int) -> int:
    return _up(_stated_width(flat, hidden) or 4 * hidden, flat.defaulted_count("mlp_multiple_of"))


def _gated_width(flat: Flat, native: Native, hidden: int, llama: bool) -> int:
    """The width of each of gate and up.

    GPT-NeoX since 2024-09 takes two thirds of intermediate_size and then half of that. Its older files, and people who
    know Hugging Face's key, mean the width itself. The two differ by a factor of 3, so the size decides: under the
    wrong reading, no usual model is as wide as 6 hidden_size or as narrow as 2. A note has the choice. Without a stated
    width, that release builds 4/3 hidden_size. Every published model means 8/3."""
    multiple = 256 if llama and not flat.given("mlp_multiple_of") else flat.defaulted_count("mlp_multiple_of")
    stated = _stated_width(flat, hidden)
    if stated is None:
        width, built = _up(hidden * 8 // 3, multiple), _third(4 * hidden, multiple)
        if not llama:
            native.note(
                f"model.mlp.hidden_size: {width}, 8/3 of hidden_size. GPT-NeoX since 2024-09 halves it to "
                f"{built} by mistake (set model.mlp.hidden_size to say otherwise)"
            )
        return width
    as_written = _up(stated, multiple)
    built = _third(stated, multiple)
    if llama or as_written == built:
        return as_written
    before_gating = stated >= BEFORE_GATING * hidden
    width = built if before_gating else as_written
    reading = (
        "GPT-NeoX's width before gating: it builds a third of it"
        if before_gating
        else f"the width of gate and up each, as in Hugging Face. GPT-NeoX since 2024-09 builds {built}"
    )
    native.note(
        f"model.mlp.hidden_size: {width}: with a gated activation {stated} is read as {reading} "
        "(set model.mlp.hidden_size to say otherwise)"
    )
    return width


def _residual(flat: Flat, native: Native) -> None:
    parallel = flat.boolean("gpt_j_residual")
    native.put("model.residual.form", "parallel" if parallel else "sequential", "gpt_j_residual")
    if parallel:
        native.put("model.residual.shared_norm", flat.boolean("gpt_j_tied"), "gpt_j_tied")
        if not flat.boolean("use_bias_in_mlp"):
            native.note(
                "gpt_j_residual with use_bias_in_mlp false: attention and MLP are both added to the stream. "
                "GPT-NeoX since 2024-09 drops the attention output here"
            )
    else:
        native.unused("gpt_j_residual is off", "gpt_j_tied")
    native.put("model.embedding.tied", not flat.boolean("no_weight_tying"), "no_weight_tying")
    dropout = flat.defaulted_number("hidden_dropout")
    native.put("model.dropout", dropout, "hidden_dropout")
    if dropout and not flat.boolean("use_bias_in_mlp"):
        native.note("model.dropout: applied to the MLP's output too. GPT-NeoX skips it where use_bias_in_mlp is false")


def _inits(flat: Flat, native: Native) -> None:
    stream = flat.choice("init_method", INITS, NO_INIT) or "normal"
    for role in ("embedding", "hidden", "head"):
        native.put(f"model.init.{role}", stream, "init_method")
    native.put(
        "model.init.output",
        flat.choice("output_layer_init_method", INITS, NO_INIT) or "scaled_normal",
        "output_layer_init_method",
    )
    native.put("model.init.std", flat.defaulted_number("init_method_std"), "init_method_std")

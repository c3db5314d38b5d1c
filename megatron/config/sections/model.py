"""What the model computes: the layer pattern, the options of each layer kind, initialisation."""

from __future__ import annotations

from typing import Any, Literal

from .base import Section, key
from .moe import MoEOptions
from .rwkv import (
    RWKV4FFNOptions,
    RWKV4Options,
    RWKV5FFNOptions,
    RWKV5Options,
    RWKV6FFNOptions,
    RWKV6Options,
    RWKV7FFNOptions,
    RWKV7Options,
)

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu2", "identity"]
Norm = Literal["layernorm", "rmsnorm", "nonparametric"]


class NormOptions(Section):
    type: Norm = key("layernorm", "Which normalisation: LayerNorm, RMSNorm, or LayerNorm without parameters.")
    epsilon: float = key(1e-5, "Added to the variance (or mean square) before the root.", gt=0)
    bias: bool = key(True, "Whether LayerNorm has a bias (RMSNorm never has one).")


class RotaryScaling(Section):
    type: Literal["none", "linear", "llama3", "yarn"] = key(
        "none", "How rotary frequencies are stretched for longer contexts."
    )
    factor: float = key(1.0, "Ratio of the new context length to the original one.", gt=0)
    original_length: int | None = key(
        None, "Context length the frequencies were made for; llama3 and yarn need it.", unit="tokens", gt=0
    )
    low_frequency_factor: float = key(
        1.0, "llama3: wavelengths longer than original_length over this are fully stretched.", gt=0
    )
    high_frequency_factor: float = key(
        4.0, "llama3: wavelengths shorter than original_length over this are left alone.", gt=0
    )
    beta_fast: float = key(32.0, "yarn: number of rotations above which a frequency is left alone.", gt=0)
    beta_slow: float = key(1.0, "yarn: number of rotations below which a frequency is fully stretched.", gt=0)
    attention_factor: float | None = key(None, "yarn: multiplier of cos and sin.", derived="0.1 * ln(factor) + 1", gt=0)


class RotaryOptions(Section):
    base: float = key(10000.0, "Base of the rotary frequencies (rope theta).", gt=0)
    fraction: float = key(1.0, "Share of each head's channels that are rotated (rotary_pct).", ge=0, le=1)
    scaling: RotaryScaling = key(RotaryScaling, "Frequency scaling for contexts longer than the original.")


class AttentionOptions(Section):
    heads: int | None = key(None, "Number of query heads; needed where the pattern has an attention layer.", gt=0)
    kv_heads: int | None = key(
        None, "Number of key/value heads (GQA; 1 is MQA).", derived="model.attention.heads", gt=0
    )
    head_dim: int | None = key(
        None, "Channels per head.", unit="channels", derived="model.hidden_size / model.attention.heads", gt=0
    )
    position: Literal["rotary", "alibi", "none"] = key("rotary", "Position information inside attention.")
    rotary: RotaryOptions = key(RotaryOptions, "Rotary embedding options, used when position is rotary.")
    window: int | None = key(
        None, "Sliding window: a token attends to itself and the window-1 tokens before it.", unit="tokens", gt=0
    )
    qk_norm: Literal["none", "head", "full"] = key(
        "none",
        "Normalise queries and keys: per head with one shared weight (Qwen3), or over the whole projected "
        "width (OLMo-2).",
    )
    softcap: float | None = key(None, "Cap attention logits c as softcap * tanh(c / softcap).", gt=0)
    scale: float | None = key(
        None, "Multiplier of query-key products.", derived="model.attention.head_dim ** -0.5", gt=0
    )
    qkv_bias: bool = key(False, "Whether the query, key and value projections have biases.")
    output_bias: bool = key(False, "Whether the output projection has a bias.")
    dropout: float = key(0.0, "Dropout of attention probabilities.", ge=0, lt=1)


class MLPOptions(Section):
    hidden_size: int | None = key(
        None,
        "Width of the MLP, with Hugging Face's meaning of intermediate_size (each of gate and up has this width).",
        unit="channels",
        derived="4 * model.hidden_size (gated: 8/3 * model.hidden_size rounded up to 256)",
        gt=0,
    )
    activation: Activation = key(
        "gelu", "Activation; gelu is the exact erf form, gelu_tanh its tanh approximation, relu2 is relu squared."
    )
    gated: bool = key(False, "Gated form: activation(gate(x)) * up(x).")
    bias: bool = key(False, "Whether the projections have biases.")


class SharedMLPOptions(MLPOptions):
    hidden_size: int | None = key(None, "Width of the MLP.", unit="channels", derived="4 * model.hidden_size", gt=0)
    gated: bool = key(True, "Gated form: activation(gate(x)) * up(x).")


class SharedAttentionOptions(AttentionOptions):
    blocks: int = key(1, "Number of blocks of shared weights, which the layers use in turn.", gt=0)
    adapter_rank: int = key(
        0, "Rank of what each layer adds to the first matrix of the shared MLP (LoRA); 0 adds nothing.", ge=0
    )
    attention_adapters: bool = key(False, "Whether each layer adds to queries, keys and values, too.")
    mlp: SharedMLPOptions = key(SharedMLPOptions, "The MLP of a shared block.")
    heads: int | None = key(None, "Number of query heads; needed where the pattern has shared attention.", gt=0)
    kv_heads: int | None = key(
        None, "Number of key/value heads (GQA; 1 is MQA).", derived="model.shared_attention.heads", gt=0
    )
    head_dim: int | None = key(
        None,
        "Channels per head.",
        unit="channels",
        derived="2 * model.hidden_size / model.shared_attention.heads",
        gt=0,
    )
    scale: float | None = key(
        None, "Multiplier of query-key products.", derived="(model.shared_attention.head_dim / 2) ** -0.5", gt=0
    )


class RecurrentOptions(Section):
    """What mixers with a convolution in front of a decaying state share."""

    convolution: int = key(4, "Taps of the causal convolution along the sequence.", unit="tokens", gt=0)
    convolution_bias: bool = key(True, "Whether the convolution has a bias.")
    time_step_low: float = key(0.001, "Initial time steps are log-uniform from here ...", gt=0)
    time_step_high: float = key(0.1, "... to here.", gt=0)
    time_step_floor: float = key(1e-4, "No initial time step is smaller.", gt=0)


class StateSpaceOptions(RecurrentOptions):
    """What the mixers of the Mamba family share."""

    expand: int = key(2, "Inner channels of the mixer over model.hidden_size.", gt=0)
    bias: bool = key(False, "Whether the projections into and out of the mixer have biases.")


class MambaOptions(StateSpaceOptions):
    state_size: int = key(16, "State elements per channel.", gt=0)
    heads: int = key(
        1, "Equal parts of the channels, each of which makes time steps, B and C of its own (Zamba has 2).", gt=0
    )
    inner_norms: bool = key(False, "RMSNorm of the time steps before their projection, and of B and C (Jamba).")
    rank: int | None = key(
        None, "Rank of the projection that gives the time steps.", derived="model.hidden_size / 16, rounded up", gt=0
    )
    chunk: int = key(
        256, "Tokens that are scanned at a time; changes memory and speed, not the result.", unit="tokens", gt=0
    )


class Mamba2Options(StateSpaceOptions):
    head_dim: int = key(64, "Inner channels per head, which share one decay.", unit="channels", gt=0)
    state_size: int = key(128, "State elements per channel.", gt=0)
    groups: int = key(1, "Groups of heads; the heads of a group share what they write (B) and read (C).", gt=0)
    least_step: float = key(0.0, "Time steps are raised to this (lower end of time_step_limit).", ge=0)
    most_step: float | None = key(None, "Time steps are cut to this (upper end of time_step_limit).", gt=0)
    chunk: int = key(64, "Tokens per chunk; changes memory and speed, not the result.", unit="tokens", gt=0)


class GatedDeltaOptions(RecurrentOptions):
    heads: int | None = key(
        None, "Number of heads of values, each with a state; needed where the pattern has a gated_delta layer.", gt=0
    )
    key_heads: int | None = key(
        None,
        "Number of heads of queries and keys; each serves as many heads of values.",
        derived="model.gated_delta.heads",
        gt=0,
    )
    key_dim: int | None = key(
        None,
        "Channels per head of queries and keys.",
        unit="channels",
        derived="3/4 * model.hidden_size / model.gated_delta.key_heads, rounded down",
        gt=0,
    )
    value_dim: int | None = key(
        None, "Channels per head of values.", unit="channels", derived="2 * model.gated_delta.key_dim", gt=0
    )
    convolution_bias: bool = key(False, "Whether the convolution has a bias.")
    negative_eigenvalues: bool = key(
        False, "What is held under a key is replaced up to twice over (beta in [0, 2]): a state can change its sign."
    )
    norm_epsilon: float | None = key(
        None, "Added to the mean square of each head's output before the root.", derived="model.norm.epsilon", gt=0
    )
    decay_low: float = key(0.0, "Initial decay rates A are uniform from here (and at least 1e-4) ...", ge=0)
    decay_high: float = key(16.0, "... to here.", gt=0)
    chunk: int = key(64, "Tokens per chunk; changes memory and speed, not the result.", unit="tokens", gt=0)


class CCAOptions(Section):
    heads: int | None = key(None, "Number of query heads; needed where the pattern has a cca layer.", gt=0)
    kv_heads: int | None = key(
        None,
        "Number of key/value heads; fewer than heads compress keys and values further.",
        derived="model.cca.heads",
        gt=0,
    )
    head_dim: int | None = key(
        None,
        "Channels per head; heads * head_dim is the compressed width in which attention runs.",
        unit="channels",
        derived="model.hidden_size / (2 * model.cca.heads)",
        gt=0,
    )
    depthwise: int = key(2, "Taps of the first convolution, of each channel alone.", unit="tokens", gt=0)
    grouped: int = key(2, "Taps of the second convolution, which mixes the channels of each head.", unit="tokens", gt=0)
    temperature: Literal["exponential", "linear"] = key(
        "exponential",
        "Keys are multiplied by exp(t), t from 0 (the paper), or by t itself, from 1 (the released ZAYA1 models).",
    )
    position: Literal["rotary", "none"] = key("rotary", "Position information inside attention.")
    rotary: RotaryOptions = key(RotaryOptions, "Rotary embedding options, used when position is rotary.")
    window: int | None = key(
        None, "Sliding window: a token attends to itself and the window-1 tokens before it.", unit="tokens", gt=0
    )
    qkv_bias: bool = key(False, "Whether the query, key and value projections have biases.")
    output_bias: bool = key(False, "Whether the output projection has a bias.")


class ResidualOptions(Section):
    form: Literal["sequential", "parallel"] = key(
        "sequential",
        "sequential: x += mixer(n1 x); x += ffn(n2 x). parallel (GPT-J, NeoX): x += mixer(n1 x) + ffn(n2 x).",
    )
    norm: Literal["pre", "post", "hybrid"] = key(
        "pre",
        "pre: norm on a branch's input. post (OLMo-2): norm on a branch's output, none on its input. hybrid (OLMo "
        "Hybrid): post in blocks with attention, pre in the others.",
    )
    shared_norm: bool = key(False, "parallel form: one norm feeds both branches (GPT-J) instead of two (NeoX).")
    fp32: bool = key(
        False,
        "The stream is fp32 in every precision (Mamba, Mamba-2, ZAYA1): branches compute in precision.compute on "
        "what their "
        "norms read, and their outputs are added in fp32. Costs twice the memory of the stream in 16-bit training.",
    )
    multiplier: float = key(
        1.0, "Each branch's output is multiplied by this before it is added (Granite, muP depth scaling)."
    )
    channel_scales: bool = key(
        False,
        "sequential form: branch y and stream x are scaled and shifted by trained vectors where they are added, x <- "
        "(y + b) * a + (x + d) * c, and so is the embedding (ZAYA1); all start at 1 and 0.",
    )


class EmbeddingOptions(Section):
    tied: bool = key(False, "Use the token embedding as the head's weight.")
    position: Literal["none", "learned"] = key(
        "none", "Learned absolute positions, training.sequence_length of them (or max_positions)."
    )
    max_positions: int | None = key(
        None, "Rows of the learned position table.", unit="tokens", derived="training.sequence_length", gt=0
    )
    multiplier: float = key(1.0, "Embeddings are multiplied by this (Gemma: sqrt(hidden_size)).", gt=0)
    norm: bool = key(False, "Normalise the embedding (BLOOM).")


class HeadOptions(Section):
    multiplier: float = key(1.0, "Logits are multiplied by this (logit scale).", gt=0)
    softcap: float | None = key(None, "Cap logits l as softcap * tanh(l / softcap).", gt=0)
    bias: bool = key(False, "Whether the head has a bias.")
    norm: Norm | None = key(None, "Type of the norm before the head.", derived="model.norm.type")


InitScheme = Literal[
    "normal",
    "scaled_normal",
    "small_init",
    "wang_init",
    "xavier_uniform",
    "xavier_normal",
    "fan_in_uniform",
    "scaled_fan_in_uniform",
    "orthogonal",
    "half_orthogonal",
    "tiny_uniform",
    "zeros",
]


class InitOptions(Section):
    std: float = key(0.02, "Standard deviation of normal; scaled_normal divides it by sqrt(2 * layers).", gt=0)
    embedding: InitScheme = key("normal", "Scheme of the token and position embeddings.")
    hidden: InitScheme = key(
        "normal", "Scheme of matrices that read the residual stream (query, key, value, gate, up)."
    )
    output: InitScheme = key(
        "scaled_normal", "Scheme of matrices that write to the residual stream (attention output, down)."
    )
    head: InitScheme | None = key(None, "Scheme of the head.", derived="model.init.embedding")
    layers: int | None = key(
        None, "Layer count in the depth-dependent schemes.", derived="the number of blocks in model.layers", gt=0
    )


class ModelSection(Section):
    layers: str = key(
        ...,
        "The stack as a pattern: kinds joined by '/', groups repeated by 'x N', variants named by '@', as in "
        "'(attention/mlp) x12'.",
    )
    hidden_size: int = key(..., "Width of the residual stream.", unit="channels", gt=0)
    vocab_size: int | None = key(
        None,
        "Rows of the embedding and of the head; never depends on the layout.",
        unit="tokens",
        derived="the tokenizer's size rounded up to a multiple of model.vocab_multiple",
        gt=0,
    )
    vocab_multiple: int = key(128, "The derived vocab_size is a multiple of this.", unit="tokens", gt=0)
    norm: NormOptions = key(NormOptions, "The norm used everywhere in the stack.")
    residual: ResidualOptions = key(ResidualOptions, "How branches are added to the residual stream.")
    embedding: EmbeddingOptions = key(EmbeddingOptions, "Token and position embeddings.")
    head: HeadOptions = key(HeadOptions, "The output head.")
    attention: AttentionOptions = key(AttentionOptions, "Options of the attention mixer.")
    mamba: MambaOptions = key(MambaOptions, "Options of the mamba mixer (Gu and Dao 2023).")
    mamba2: Mamba2Options = key(Mamba2Options, "Options of the mamba2 mixer (Dao and Gu 2024).")
    rwkv4: RWKV4Options = key(RWKV4Options, "Options of the rwkv4 mixer (Peng et al. 2023).")
    rwkv5: RWKV5Options = key(RWKV5Options, "Options of the rwkv5 mixer (Eagle, Peng et al. 2024).")
    rwkv6: RWKV6Options = key(RWKV6Options, "Options of the rwkv6 mixer (Finch, Peng et al. 2024).")
    rwkv7: RWKV7Options = key(RWKV7Options, "Options of the rwkv7 mixer (Peng et al. 2025).")
    rwkv4_ffn: RWKV4FFNOptions = key(RWKV4FFNOptions, "Options of the rwkv4_ffn feed-forward.")
    rwkv5_ffn: RWKV5FFNOptions = key(RWKV5FFNOptions, "Options of the rwkv5_ffn feed-forward.")
    rwkv6_ffn: RWKV6FFNOptions = key(RWKV6FFNOptions, "Options of the rwkv6_ffn feed-forward.")
    rwkv7_ffn: RWKV7FFNOptions = key(RWKV7FFNOptions, "Options of the rwkv7_ffn feed-forward.")
    gated_delta: GatedDeltaOptions = key(
        GatedDeltaOptions, "Options of the gated_delta mixer (Yang, Kautz and Hatamizadeh 2024)."
    )
    cca: CCAOptions = key(
        CCAOptions, "Options of the cca mixer, compressed convolutional attention (Figliolia et al. 2025)."
    )
    shared_attention: SharedAttentionOptions = key(
        SharedAttentionOptions, "Options of shared_attention, which runs beside a mixer (Zamba, Glorioso et al. 2024)."
    )
    mlp: MLPOptions = key(MLPOptions, "Options of the mlp feed-forward.")
    moe: MoEOptions = key(MoEOptions, "Options of the moe feed-forward: a mixture of experts.")
    variants: dict[str, dict[str, Any]] = key(
        dict,
        "Named variants: options that override a kind's own where the pattern says kind@name, as in 'local: "
        "{window: 512}'.",
    )
    dropout: float = key(0.0, "Dropout of the embedding and of each branch's output.", ge=0, lt=1)
    init: InitOptions = key(InitOptions, "How parameters start.")
    kernels: Literal["auto", "torch", "mamba_ssm", "fla"] = key(
        "auto", "What computes recurrent mixers: torch, or a package of GPU kernels; auto takes one that is installed."
    )

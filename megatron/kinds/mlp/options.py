"""Options of the mlp feed-forward network, and their rules."""

from typing import Literal

from megatron.config.kind import LayerKind
from megatron.config.section import Derivable, Section, key
from megatron.kinds.common.options import MLP_WIDTH, Activation, derived_key, divides_over_tensor_ranks, mlp_width


class MLPOptions(Section):
    hidden_size: Derivable[int] = derived_key(
        "Width of the MLP, with Hugging Face's meaning of intermediate_size (each of gate and up has this width).",
        MLP_WIDTH,
        mlp_width("mlp"),
        "model.hidden_size .gated",
        unit="channels",
    )
    activation: Literal[Activation, "xielu"] = key(
        "gelu",
        "Activation. gelu is the exact erf form, gelu_tanh its tanh approximation, relu2 is relu squared, quick_gelu "
        "x * sigmoid(1.702 x). xielu (Apertus) has two trained numbers in each layer.",
    )
    gated: bool = key(False, "Gated form: activation(gate(x)) * up(x).")
    bias: bool = key(False, "Whether the projections have biases.")
    gate_multiplier: float = key(1.0, "Multiplies what the activation is applied to (Falcon-H1).", gt=0)
    output_multiplier: float = key(1.0, "Multiplies the output.", gt=0)


KIND = LayerKind(
    role="ffn",
    columns=True,
    options=MLPOptions,
    about="Options of the mlp feed-forward.",
    layer="megatron.kinds.mlp.layer:MLP",
    rules=(divides_over_tensor_ranks("hidden_size", "channels"),),
    linears=lambda options: ("gate_up" if options.gated else "up", "down"),
    weights=lambda options, width: ((3 if options.gated else 2) * width * (options.hidden_size or 0), 0),
    compiles=True,
    context="alone",
    repeats=True,
)

"""OLMo (Groeneveld et al. 2024), an architecture of transformers: Llama with norms that have no weights."""

from megatron.checkpoint.hf.architecture import Architecture, Field
from megatron.checkpoint.hf.architectures import common
from megatron.checkpoint.hf.layers import uniform
from megatron.checkpoint.hf.parts import RotaryPart

OLMO = Architecture(
    "olmo",
    "OlmoForCausalLM",
    (common.EMBEDDING, *common.LLAMA_ATTENTION, *common.LLAMA_MLP, common.HEAD),
    uniform("attention/mlp"),
    fields=(
        *common.SIZES,
        Field("attention.kv_heads", "num_key_value_heads"),
        Field("mlp.hidden_size", "intermediate_size"),
        common.activation("hidden_act"),
        common.QKV_BIAS,
        common.OUTPUT_BIAS,
    ),
    fixed={
        **common.LLAMA_FIXED,
        "norm.type": "nonparametric",
        "norm.epsilon": 1e-5,  # written into their class
        "mlp.bias": False,
    },
    required={"clip_qkv": None},
    parts=(RotaryPart(),),
)

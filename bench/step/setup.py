"""Shapes, data and recipe of the steps that all contenders train (`contenders.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.config import Config

LR, BETAS, EPSILON, WEIGHT_DECAY, CLIP, SEED = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, 1234
VOCABULARY = 50304
SHAPES = {  # of the Pythia suite: hidden size, layers, heads
    "pythia-14m": (128, 6, 4),
    "pythia-70m": (512, 6, 8),
    "pythia-160m": (768, 12, 12),
    "pythia-410m": (1024, 24, 16),
    "pythia-1.4b": (2048, 24, 16),
    "tiny": (32, 2, 2),
    # As Llama's layers are: grouped queries (a quarter of the heads have keys), SwiGLU, RMSNorm, no biases
    "llama-14m": (128, 6, 4),
    "llama-70m": (512, 6, 8),
    "llama-160m": (768, 12, 12),
    "llama-tiny": (32, 2, 4),
    # Mamba-2 of the same widths: a layer has about the parameters of half a block of attention and mlp
    "mamba2-14m": (128, 12, 4),
    "mamba2-70m": (512, 12, 16),
    "mamba2-370m": (1024, 48, 16),
    "mamba2-tiny": (32, 2, 4),
    # RWKV-7: a block has the parameters of one of attention and mlp, and in addition the matrices of low rank
    "rwkv7-14m": (128, 6, 2),
    "rwkv7-70m": (512, 6, 8),
    "rwkv7-tiny": (32, 2, 2),
}


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        options: dotted keys of our configuration that differ from its defaults.
        precision: "fp32" or "bf16". None is fp32 on CPU, and bf16 on a GPU.
        clock: "wall", or "cpu" for processor seconds of the contender, which other work on the machine disturbs less.
    """

    shape: str
    sequence: int
    micro_batch: int
    device: str = "cpu"
    vocabulary: int = VOCABULARY
    options: tuple[tuple[str, Any], ...] = ()
    clock: str = "wall"
    precision: str | None = None

    @property
    def compute(self) -> str:
        """The type of the matrix products."""
        return self.precision or ("fp32" if self.device == "cpu" else "bf16")

    @property
    def tokens(self) -> int:
        """In one step."""
        return self.sequence * self.micro_batch * dict(self.options).get("training.accumulation", 1)


def configuration(setup: Setup) -> Config:
    """Our configuration of the setup."""
    from megatron.config import resolve

    values: dict[str, Any] = {
        "model": {"vocab_size": setup.vocabulary, "embedding": {"tied": False}, **architecture(setup.shape)},
        **recipe(setup),
        "precision": {"compute": setup.compute},
    }
    for dotted, value in setup.options:
        *path, last = dotted.split(".")
        section = values
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return resolve(values)


def recipe(setup: Setup) -> dict[str, Any]:
    """The sections `training` and `optimizer`: what all contenders do."""
    return {
        "training": {
            "steps": 1000,
            "seed": SEED,
            "sequence_length": setup.sequence,
            "micro_batch_size": setup.micro_batch,
        },
        "optimizer": {
            "lr": LR,
            "betas": list(BETAS),
            "epsilon": EPSILON,
            "weight_decay": WEIGHT_DECAY,
            "gradient_clipping": CLIP,
        },
    }


def architecture(shape: str) -> dict[str, Any]:
    """The `model` section of a shape, without its ends."""
    hidden, layers, heads = SHAPES[shape]
    if shape.startswith("mamba2"):
        return {
            "layers": f"mamba2 x{layers}",
            "hidden_size": hidden,
            "norm": {"type": "rmsnorm", "epsilon": 1e-5},
            "mamba2": {"head_dim": 2 * hidden // heads, "state_size": 128},
        }
    if shape.startswith("rwkv7"):
        return {
            "layers": f"(rwkv7/rwkv7_ffn) x{layers}",
            "hidden_size": hidden,
            "norm": {"type": "layernorm", "bias": True},
            "rwkv7": {"head_dim": hidden // heads},
        }
    if shape.startswith("llama"):
        return {
            "layers": f"(attention/mlp) x{layers}",
            "hidden_size": hidden,
            "attention": {"heads": heads, "kv_heads": heads // 4},
            "mlp": {"hidden_size": -(-hidden * 8 // 3 // 64) * 64, "activation": "silu", "gated": True},
            "norm": {"type": "rmsnorm", "epsilon": 1e-5},
        }
    return {
        "layers": f"(attention/mlp) x{layers}",
        "hidden_size": hidden,
        "attention": {"heads": heads, "qkv_bias": True, "output_bias": True, "rotary": {"fraction": 0.25}},
        "mlp": {"hidden_size": 4 * hidden, "activation": "gelu", "gated": False, "bias": True},
        "norm": {"type": "layernorm", "bias": True, "epsilon": 1e-5},
        "residual": {"form": "parallel", "shared_norm": False},
    }


def flops_per_token(config: Config) -> int:
    """Of a step, forward and backward: the layers' own counts, attention whole."""
    from megatron.model.costs.describe import totals

    return totals(config).training_flops


def batch_tokens(setup: Setup, step: int) -> torch.Tensor:
    """Tokens of a step, int64 [1, M, S + 1]: a function of only the step."""
    import torch

    generator = torch.Generator().manual_seed(SEED + step % 4)
    return torch.randint(setup.vocabulary, (1, setup.micro_batch, setup.sequence + 1), generator=generator)

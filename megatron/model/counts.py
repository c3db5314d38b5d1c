"""Costs of layers. Every number shown to a user (parameters, FLOPs, memory) is a sum of these."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Costs of one layer, whole (not per rank)."""

    parameters: int = 0  # trainable elements.
    # Floating point operations of the forward pass per token. A multiply-add is two. They are of matrix products and
    # attention, over the full S x S square for causal attention (the convention of PaLM, Chowdhery et al. 2022,
    # appendix B, and of Megatron).
    flops: int = 0
    # Elements kept for the backward pass per token, without recomputation, in units of the compute type, with the fused
    # kernels of a GPU. A layer counts its input. A view counts with its whole tensor.
    activations: int = 0
    whole: int = 0  # activations that every tensor parallel rank keeps whole. It has its share of the others.
    # Further elements where the compute type has 16 bits, of tensors that are fp32 in every precision, on every tensor
    # parallel rank
    copies: int = 0
    products: int = 0  # activations that selective recomputation keeps: results of matrix products and attention
    state: int = 0  # elements of decoding state per sample at `training.sequence_length` tokens
    memory: int = 0  # elements of the state that are fp32 in every precision: the memory of a recurrence
    idle: int = 0  # parameters of experts that a token does not use

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

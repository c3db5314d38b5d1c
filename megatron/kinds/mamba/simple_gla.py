"""Linear attention with one decay for each head, by the kernels of flash-linear-attention, which is loaded at the first
call. Inside of a compiled block they are two `operations`.

Queries and keys are [B, S, h, N], values [B, S, h, P], logarithms of decays [B, S, h] in fp32."""

from torch import Tensor

from megatron.kinds.common.recurrence.operations import operations

CHUNK = 64  # tokens


def by_kernels(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(query, key, value, decay, scale=1.0)[0]


def _rows(*given: Tensor) -> tuple[Tensor, ...]:
    """Contiguous, whatever strides a compiler gave them."""
    return tuple(each.contiguous() for each in given)


def forward_by_kernels(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """`by_kernels`, and sums of decays from the begin of each chunk."""
    from fla.ops.simple_gla.chunk import RCP_LN2, chunk_local_cumsum, chunk_simple_gla_fwd

    query, key, value, decay = _rows(query, key, value, decay)
    sums = chunk_local_cumsum(decay, chunk_size=CHUNK, scale=RCP_LN2)  # for powers of two
    return chunk_simple_gla_fwd(query, key, value, sums, scale=1.0, chunk_size=CHUNK)[0], sums


def gradient_by_kernels(
    of_y: Tensor, query: Tensor, key: Tensor, value: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the four inputs, without the forward pass of autograd."""
    from fla.ops.simple_gla.chunk import chunk_local_cumsum, chunk_simple_gla_bwd

    of_y, query, key, value, sums = _rows(of_y, query, key, value, sums)
    given = {"q": query, "k": key, "v": value, "g": sums, "do": of_y, "scale": 1.0, "chunk_size": CHUNK}
    *found, of_sums, _ = chunk_simple_gla_bwd(**given, g_gamma=None, initial_state=None, dht=None)
    of_query, of_key, of_value = (each.to(own.dtype) for each, own in zip(found, (query, key, value)))
    return of_query, of_key, of_value, chunk_local_cumsum(of_sums, chunk_size=CHUNK, reverse=True)


operation, gradient = operations("simple_gla", forward_by_kernels, gradient_by_kernels, like=(2, 3))

"""SparseLoCo's compression of one tensor (arXiv 2508.15706, 2603.08163): chunks, top-k, two bits a value, error
feedback.

A chunk has 4,096 values: a block of 64 x 64 of a matrix, or a run of a tensor whose sides are no multiples of 64. Of
each chunk the k largest magnitudes are sent, with an index of 12 bits and a code of two bits. The four values of the
codes are sent once per tensor. The rest, and the error of the codes, stay with the sender for the next round.

Sent and kept add up to the accumulated values without rounding. Accumulated values are therefore multiples of a power
of two, 2^-22 of the largest magnitude in fp32 (2^-51 in fp64), and so are the four values (2^-22)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, prod, sqrt

import torch
from torch import Tensor

BLOCK = 64
CHUNK = BLOCK * BLOCK
BINS, SIGMAS = 4, 6.0
TABLE_BYTES = 4 * BINS


@dataclass(frozen=True)
class Sparse:
    """A compressed tensor.

    Attributes:
        indices: of the kept values in their chunks, 12 bits each, uint8 [ceil(1.5 n)].
        codes: two bits each, uint8 [ceil(n / 4)].
        table: the value of each code, fp32 [4].
    """

    indices: Tensor
    codes: Tensor
    table: Tensor

    def fits(self, shape: Sequence[int], k: int) -> bool:
        """Whether a tensor of this shape can have these types, sizes and indices."""
        count, bits = kept(shape, k), (self.indices, self.codes)
        sizes = [((3 * count + 1) // 2,), ((count + 3) // 4,), (BINS,)]
        if [tuple(each.shape) for each in (*bits, self.table)] != sizes:
            return False
        if any(each.dtype != torch.uint8 for each in bits) or self.table.dtype != torch.float32:
            return False
        if not self.table.isfinite().all():
            return False
        (full, rest), k = divmod(prod(shape), CHUNK), min(k, CHUNK)
        indices = unpack_indices(self.indices, count)
        rows, tail = indices[: full * k].view(full, k), indices[full * k :]
        # A repeated index would make the sum depend on the order of writes.
        return bool((rows.diff() > 0).all() and (tail.diff() > 0).all() and (tail < rest).all())


def kept(shape: Sequence[int], k: int) -> int:
    """Number of values that are sent of a tensor. A last chunk of r values keeps k r / 4,096, rounded up."""
    full, rest = divmod(prod(shape), CHUNK)
    return full * min(k, CHUNK) + -(-rest * k // CHUNK)


def bytes_of(shape: Sequence[int], k: int) -> int:
    """Bytes that are sent of a tensor: 14 bits for each kept value, and the table."""
    count = kept(shape, k)
    return (3 * count + 1) // 2 + (count + 3) // 4 + TABLE_BYTES


def accumulate(residual: Tensor, delta: Tensor, decay: float) -> Tensor:
    """decay * residual + delta, as multiples of a power of two."""
    return _rounded(residual * decay + delta, 51 if delta.dtype == torch.float64 else 22)


def compress(values: Tensor, k: int) -> Sparse:
    """Compress a result of `accumulate`."""
    chunks, tail = _chunks(values)
    kept_tail = -(-tail.numel() * k // CHUNK)
    pairs = [_largest(chunks, min(k, CHUNK)), _largest(tail[None], kept_tail)]
    indices = torch.cat([index.flatten() for index, _ in pairs])
    codes, table = _quantized(torch.cat([value.flatten() for _, value in pairs]), float(values.abs().max()))
    return Sparse(pack_indices(indices), _pack_codes(codes), table)


def decompress(sparse: Sparse, shape: Sequence[int], k: int, dtype: torch.dtype) -> Tensor:
    """The tensor that was sent, zero where nothing was."""
    count, size = kept(shape, k), prod(shape)
    indices, codes = unpack_indices(sparse.indices, count), _unpack_codes(sparse.codes, count)
    full = size // CHUNK
    chunk = torch.arange(count) // max(min(k, CHUNK), 1)
    flat = torch.zeros(size, dtype=dtype)
    flat[chunk.clamp(max=full) * CHUNK + indices] = sparse.table.to(dtype)[codes]
    if _in_blocks(shape):
        flat = flat.view(-1, shape[-1] // BLOCK, BLOCK, BLOCK).transpose(1, 2)
    return flat.reshape(tuple(shape))


def norm_of(sparse: Sparse, shape: Sequence[int], k: int) -> float:
    """Norm of the tensor that was sent. Each processor gets the same bits: a norm of a tensor has an order of sums."""
    counts = torch.bincount(_unpack_codes(sparse.codes, kept(shape, k)), minlength=BINS).tolist()
    return sqrt(fsum(count * value * value for count, value in zip(counts, sparse.table.tolist())))


def clipped_to_median(deltas: Sequence[Tensor], norms: Sequence[float]) -> list[Tensor]:
    """Scale the deltas of a tensor whose norm is above the (lower) median of the norms down to it."""
    median = sorted(norms)[(len(norms) - 1) // 2]
    return [each * (median / norm) if norm > median else each for each, norm in zip(deltas, norms)]


def _in_blocks(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and prod(shape[:-1]) % BLOCK == 0 and shape[-1] % BLOCK == 0 and prod(shape) > 0


def _chunks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks [n, 4096] and the rest, 1-D."""
    if _in_blocks(values.shape):
        matrix = values.reshape(-1, BLOCK, values.shape[-1] // BLOCK, BLOCK)
        return matrix.transpose(1, 2).reshape(-1, CHUNK), values.new_empty(0)
    flat = values.reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    return flat[:whole].view(-1, CHUNK), flat[whole:]


def _largest(chunks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices, ascending, and values of the k largest magnitudes of each row."""
    indices = chunks.abs().topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    return indices, chunks.gather(-1, indices)


def _quantized(values: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Codes, and the mean of the values of each code. Bins are 1.5 standard deviations wide, around the mean."""
    exact = values.double()
    shift = exact.mean() if len(exact) else exact.new_zeros(())
    centered = exact - shift
    scale = SIGMAS * float(centered.norm()) / sqrt(max(len(exact) - 1, 1)) / BINS
    codes = (centered / (scale or 1.0) + BINS // 2).round().clamp(0, BINS - 1).long()
    counts = torch.bincount(codes, minlength=BINS)
    means = torch.bincount(codes, weights=centered, minlength=BINS) / counts.clamp(min=1) + shift
    return codes, _rounded(torch.where(counts > 0, means, 0.0), 22, largest).float()


def _rounded(values: Tensor, bits: int, largest: float | None = None) -> Tensor:
    """Round to multiples of 2^-bits times the power of two at or above the largest magnitude."""
    largest = float(values.abs().max()) if largest is None and values.numel() else largest or 0.0
    if largest == 0 or largest != largest or largest == float("inf"):
        return values
    _, exponent = torch.frexp(torch.tensor(largest, dtype=torch.float64))
    unit = 2.0 ** (int(exponent) - bits)
    return ((values.double() / unit).round() * unit).to(values.dtype)


def pack_indices(indices: Tensor) -> Tensor:
    """12 bits each, two in three bytes."""
    a, b = torch.nn.functional.pad(indices, (0, len(indices) % 2)).view(-1, 2).unbind(1)
    packed = torch.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], dim=1).to(torch.uint8).flatten()
    return packed[: (3 * len(indices) + 1) // 2].clone()


def unpack_indices(packed: Tensor, count: int) -> Tensor:
    x, y, z = torch.nn.functional.pad(packed.long(), (0, -len(packed) % 3)).view(-1, 3).unbind(1)
    return torch.stack([x | ((y & 15) << 8), (y >> 4) | (z << 4)], dim=1).flatten()[:count]


def _pack_codes(codes: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return (rows << torch.tensor([0, 2, 4, 6])).sum(1).to(torch.uint8)


def _unpack_codes(packed: Tensor, count: int) -> Tensor:
    return ((packed.long()[:, None] >> torch.tensor([0, 2, 4, 6])) & 3).flatten()[:count]

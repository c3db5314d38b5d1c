"""Sharded matrices: linear layers cut by output or by input channels, and the token embedding."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layout.initial import ZEROS, Init
from ..layout.mesh import ALONE, Axis, Mesh
from ..layout.precision import plain
from ..layout.shard import Growth, Role, Shard
from .async_tensor import gathered_through, scattered_product
from .collectives import enter, gather_channels, gather_rows, leave, split_channels, sum_gradient, sum_parts
from .eight_bits import Linear
from .folded import embedding_of_rows
from .parameters import ParameterFactory


class ColumnLinear(nn.Module):
    """[..., inputs] to this rank's slice of [..., outputs]. Lives inside a tensor region. With columns, the inputs are
    this rank's channels of the residual stream, and the products are summed.

    Args:
        parts: sizes of the fused matrices along the outputs. Each is cut separately.
        unit: cuts fall on multiples of this many outputs (head_dim).
        heads: "query", "key" or "value" for each part, where it gives heads of `unit` outputs.
        shard: False keeps the whole matrix on every rank. Then each rank may use only part of the result, and
            the gradient is summed over the ranks (key/value heads fewer than ranks).
        folds: whether ranks may share the rows of the matrix (`ParameterFactory.row_axis`).
        stream: False where the inputs are no channels of the stream, but numbers that all columns have (a low rank).
            Each column then has whole rows, since a cut would only add a sum of the outputs.
    """

    def __init__(
        self,
        make: ParameterFactory,
        inputs: int,
        parts: tuple[int, ...],
        *,
        init: Init,
        role: Role = Role.HIDDEN,
        bias: bool = False,
        unit: int = 1,
        shard: bool = True,
        growth: Growth | None = None,
        heads: tuple[str, ...] | None = None,
        folds: bool = True,
        stream: bool = True,
    ):
        super().__init__()
        self.axis, self.columns = make.mesh.tensor, make.mesh.columns if stream else ALONE
        self.shard = shard
        cut = Shard(0, parts, unit) if shard else None
        outputs = sum(parts)
        self.rows = make.row_axis(outputs, cut) if folds else ALONE
        self.weight = make.parameter(
            "weight",
            (outputs, inputs),
            role=role,
            init=init,
            shard=cut,
            matrices=parts,
            growth=growth,
            heads=None if heads is None else tuple((each, unit) for each in heads),
            rows=self.rows,
            stream=1 if stream else None,
        )
        self.bias = make.parameter("bias", (outputs,), role=Role.BIAS, init=ZEROS, shard=cut) if bias else None
        self.linear = make.linear(inputs, outputs, self.rows)

    def forward(self, x: Tensor) -> Tensor:
        return over_columns(self.linear, x, *self.used(), self.columns)

    def used(self) -> tuple[Tensor, Tensor | None]:
        """The matrix and the bias that this rank multiplies with and adds."""
        if self.shard:
            return self.weight, self.bias
        bias = None if self.bias is None else sum_gradient(self.bias, self.axis)
        return sum_gradient(self.weight, self.axis), bias

    def is_plain(self) -> bool:
        """Whether it is nothing but its matrix and bias: without adapters, other hooks or products of 8 bits."""
        hooks = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return self.linear is plain and not hooks

    def matrix(self) -> Tensor:
        """This tensor parallel rank's part of the matrix, for layers that multiply with it themselves. With columns,
        all of its inputs."""
        return gather_channels(gather_rows(self.weight, self.rows), self.columns)


def over_columns(product: Linear, x: Tensor, weight: Tensor, bias: Tensor | None, columns: Axis) -> Tensor:
    """The product with all inputs, where each of the columns has some of them, and the bias."""
    if columns.size == 1:
        return product(x, weight, bias)
    y = sum_parts(product(x, weight, None), columns)
    return y if bias is None else y + bias


def joined(columns: Sequence[ColumnLinear], x: Tensor) -> Tensor:
    """The products of plain ones with the same input, as one."""
    matrices, biases = zip(*(each.used() for each in columns))
    bias = None if any(each is None for each in biases) else torch.cat(biases)
    return plain(x, torch.cat(matrices), bias)


def entered(x: Tensor, columns: Sequence[ColumnLinear], mesh: Mesh) -> tuple[Tensor, list[Tensor]]:
    """Enter the tensor region, and apply each of these matrices: [B, S, H], and [B, S, ...] of each."""
    if not mesh.layout.async_tensor:
        x = enter(x, mesh)
        return x, [each(x) for each in columns]
    matrices, biases = zip(*(each.used() for each in columns))
    x, products = gathered_through(x, matrices, mesh.tensor)
    return x, [y if bias is None else y + bias for y, bias in zip(products, biases)]


class RowLinear(nn.Module):
    """This rank's slice of [..., inputs] to the whole [..., outputs]. Closes a tensor region.

    The bias is added once, after the sum over ranks. With columns, the outputs are this rank's channels of the stream.
    """

    def __init__(
        self,
        make: ParameterFactory,
        inputs: int,
        outputs: int,
        *,
        init: Init,
        role: Role = Role.OUTPUT,
        bias: bool = False,
        unit: int = 1,
    ):
        super().__init__()
        self.mesh, self.rows = make.mesh, make.row_axis(outputs // make.mesh.columns.size)
        self.weight = make.parameter(
            "weight",
            (outputs, inputs),
            role=role,
            init=init,
            shard=Shard(1, None, unit),
            matrices=(outputs,),
            rows=self.rows,
            stream=0,
        )
        self.bias = make.parameter("bias", (outputs,), role=Role.BIAS, init=ZEROS, stream=0) if bias else None
        self.linear = make.linear(inputs, outputs, self.rows)

    def forward(self, x: Tensor) -> Tensor:
        x = sum_gradient(x, self.mesh.columns)  # all columns have the same, and each makes other channels of it
        if self.mesh.tensor.size == 1:
            return self.linear(x, self.weight, self.bias)
        if self.mesh.layout.async_tensor:
            y = scattered_product(x, self.weight, self.mesh.tensor)
        else:
            y = leave(self.linear(x, self.weight, None), self.mesh)
        if self.bias is None:
            return y
        # With sequence parallelism each rank adds the bias to its part of the sequence only.
        return y + (sum_gradient(self.bias, self.mesh.tensor) if self.mesh.layout.sequence else self.bias)


class PartialLinear(nn.Module):
    """This rank's slice of [..., inputs] to its part of the sum [..., outputs]. The tensor region stays open. With
    columns, the outputs are this rank's channels of the stream."""

    def __init__(self, make: ParameterFactory, inputs: int, outputs: int, *, init: Init):
        super().__init__()
        shape, cut, self.columns = (outputs, inputs), Shard(1), make.mesh.columns
        self.weight = make.parameter(
            "weight", shape, role=Role.OUTPUT, init=init, shard=cut, matrices=(outputs,), stream=0
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(sum_gradient(x, self.columns), self.weight)


class WholeLinear(nn.Module):
    """[..., s, inputs] to [..., s, outputs] outside of tensor regions. Every rank has the whole matrix.

    With sequence parallelism each rank sees part of the positions, and the gradient is summed over the ranks."""

    def __init__(self, make: ParameterFactory, inputs: int, outputs: int, *, init: Init, role: Role = Role.OUTPUT):
        super().__init__()
        self.axis = make.mesh.tensor if make.mesh.layout.sequence else None
        self.rows, shape = make.row_axis(outputs), (outputs, inputs)
        self.weight = make.parameter("weight", shape, role=role, init=init, matrices=(outputs,), rows=self.rows)
        self.linear = make.linear(inputs, outputs, self.rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight if self.axis is None else sum_gradient(self.weight, self.axis), None)


class VocabEmbedding(nn.Module):
    """Token ids [B, S] to embeddings [B, S, H] (or [B, S/t, H], or with c columns [B, S, H/c]). The rows of the table
    are cut over all tensor parallel ranks.

    Attributes:
        sparse: the engine takes a gradient of only the rows in a batch, if no hook reads it.
    """

    sparse = False

    def __init__(
        self, make: ParameterFactory, vocab: int, hidden: int, *, init: Init, weight: nn.Parameter | None = None
    ):
        """`weight`: of another embedding, which this one shares."""
        super().__init__()
        self.mesh, self.rows, shape = make.mesh, make.row_axis(vocab, table=True), (vocab, hidden)
        if weight is None:
            weight = make.parameter("weight", shape, role=Role.EMBEDDING, init=init, shard=Shard(0), rows=self.rows)
        self.weight = weight
        (self.span,) = Shard(0).spans(vocab, self.mesh.tensor.rank, self.mesh.tensor.size)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        if self.rows.size > 1:
            return embedding_of_rows(tokens_BS, self.weight, self.rows)
        if self.mesh.tensor.size == 1:
            sparse = self.sparse and tokens_BS.numel() < len(self.weight) and not self.weight._backward_hooks
            return F.embedding(tokens_BS, self.weight, sparse=sparse)
        local_BS = tokens_BS - self.span.start
        foreign_BS = (local_BS < 0) | (local_BS >= self.span.length)
        x_BSH = F.embedding(local_BS.masked_fill(foreign_BS, 0), self.weight)
        x = leave(x_BSH.masked_fill(foreign_BS.unsqueeze(-1), 0), self.mesh)
        return split_channels(x, self.mesh.columns)


def sequence_slice(x: Tensor, mesh: Mesh, dim: int = 1) -> Tensor:
    """This rank's part of a whole tensor along the sequence, where the residual stream is cut. No gradient flows."""
    if not mesh.layout.sequence:
        return x
    length = x.shape[dim] // mesh.tensor.size
    return x.narrow(dim, mesh.tensor.rank * length, length)

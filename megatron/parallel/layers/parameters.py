"""Making parameters: the one place where a logical tensor becomes this rank's `nn.Parameter`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.initial import Init, initial_values
from ..layout.mesh import ALONE, Axis, Mesh
from ..layout.precision import wide_type
from ..layout.shard import UNSCALED, Growth, LogicalTensor, Role, Scales, Shard, Span, growth_of
from .context import ContextGroup
from .depth import linear_of_gathered
from .eight_bits import Linear, linear_for
from .folded import linear_of_rows


@dataclass(frozen=True)
class ParameterFactory:
    """Creates this rank's shards of logical tensors, with their initial values.

    Attributes:
        mesh: where this rank stands.
        seed: of the run. Values are a function of it and of the logical name.
        device: "meta" makes parameters without values.
        dtype: type of parameters that may be rounded. Those marked keep_fp32 stay fp32 (float64 where this is).
        prefix: logical name of the module.
        values: False: parameters have no values, which the builder of the model writes.
        scales: factors of training for each way to grow (`model/parametrization.py`).
        products: `precision.products`.
    """

    mesh: Mesh
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    prefix: str = ""
    values: bool = True
    scales: Callable[[Growth], Scales] = lambda growth: UNSCALED
    products: str = "compute"

    @property
    def context(self) -> ContextGroup:
        """The ranks that share each sample's tokens with this one."""
        return ContextGroup.of(self.mesh)

    def row_axis(self, rows: int, cut: Shard | None = None, *, table: bool = False) -> Axis:
        """The ranks that share a matrix of n rows, if they divide the rows of every tensor parallel rank. Where they
        fold these are the ranks of a sequence, and with depth neighbours among the replicas.

        Args:
            table: of a vocabulary. Tables stay whole over depth: a lookup reads few of their rows.
        """
        axis, tensor = ALONE if table else self.mesh.depth, self.mesh.tensor.size
        if self.mesh.layout.shares_rows:
            axis = self.mesh.context
        held = [rows]
        if cut is not None and cut.dim == 0:
            held = [sum(span.length for span in cut.spans(rows, rank, tensor)) for rank in range(tensor)]
        return ALONE if any(each % axis.size for each in held) else axis

    def linear(self, inputs: int, outputs: int, rows: Axis = ALONE) -> Linear:
        """The product with a matrix of these sides, whose rows the ranks of an axis share."""
        if rows.size > 1:
            return partial(linear_of_rows if self.mesh.layout.shares_rows else linear_of_gathered, axis=rows)
        return linear_for(self.products, inputs, outputs, self.device, self.dtype)

    @property
    def of_stream(self) -> "ParameterFactory":
        """For layers that read and write the residual stream (`Mesh.of_blocks`)."""
        return replace(self, mesh=self.mesh.of_blocks)

    def scope(self, name: str) -> "ParameterFactory":
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        role: Role,
        init: Init,
        shard: Shard | None = None,
        keep_fp32: bool = False,
        matrices: tuple[int, ...] | None = None,
        experts: bool = False,
        growth: Growth | None = None,
        heads: tuple[tuple[str, int], ...] | None = None,
        rows: Axis = ALONE,
        stream: int | None = None,
    ) -> nn.Parameter:
        """This rank's shard of the logical tensor `<prefix>.<name>` of (whole) `shape`.

        Args:
            experts: dimension 0 counts experts, and each expert parallel rank has a run of them. Where they are folded
                over the tensor axis, `shard` cuts nothing.
            growth: how its fans grow with the model's width, where that does not follow from its role.
            heads: see `LogicalTensor`.
            rows: ranks that have equal runs of its rows (`row_axis`).
            stream: the dimension of the residual stream's channels, which columns of ranks cut.
        """
        at, run, copy = self.mesh.tensor, None, False
        if self.mesh.grid is not None:
            shard, at, copy = self._on_grid(shard, stream)
        scales = self.scales(growth or growth_of(role))
        logical = LogicalTensor(
            f"{self.prefix}.{name}" if self.prefix else name, shape, role, shard, keep_fp32, matrices, scales, heads
        )
        dtype = wide_type(self.dtype) if keep_fp32 else self.dtype
        if rows.size > 1:
            run = _run(logical.local_shape(at.rank, at.size)[0], rows)
        if experts:
            at = self.mesh.expert_tensor if self.mesh.grid is None else at
            run = _run(shape[0], self.mesh.expert) if self.mesh.layout.spreads_experts else None
        if not self.values or torch.device(self.device).type == "meta":
            local = torch.empty(logical.local_shape(at.rank, at.size, run), dtype=dtype, device=self.device)
        else:
            local = initial_values(logical, init, self.seed, at.rank, at.size, run).to(device=self.device, dtype=dtype)
        parameter = nn.Parameter(local)
        marks: Any = parameter  # torch's tensors take attributes of any name. The functions below read these
        marks.logical, marks.init = logical, init
        marks.cut = (0, 1) if shard is None else (at.rank, at.size)
        if shard is not None and (self.mesh.grid or self.mesh.tensor).size > 1:
            # DeepSpeed counts parameters without this mark once per tensor parallel group in the gradient norm.
            marks.model_parallel = marks.tensor_model_parallel = True
        if copy:
            marks.ds_pipe_replicated = marks.of_grid = True  # for norms and checkpoints, as tied copies of other stages
        if run is not None:
            marks.run, marks.shares_rows = run, not experts
        return parameter

    def _on_grid(self, shard: Shard | None, stream: int | None) -> tuple[Shard | None, Axis, bool]:
        """(its cut, the ranks among which it is cut, whether an earlier rank has the same part), with columns."""
        mesh, columns = self.mesh, self.mesh.columns
        assert mesh.grid is not None
        if stream is None:
            return shard, mesh.tensor, shard is not None and columns.rank > 0
        if shard is None:
            return Shard(stream, across=stream, columns=columns.size), columns, mesh.tensor.rank > 0
        return replace(shard, across=stream, columns=columns.size), mesh.grid, False

    def buffer(self, name: str, shape: tuple[int, ...], *, role: Role) -> Tensor:
        """A tensor that checkpoints keep and no optimizer sees: fp32, whole on every rank, 0 at the start."""
        tensor = torch.zeros(shape, dtype=torch.float32, device=self.device)
        marks: Any = tensor
        marks.logical = LogicalTensor(f"{self.prefix}.{name}" if self.prefix else name, shape, role, keep_fp32=True)
        return tensor


def _run(size: int, axis: Axis) -> Span:
    """This rank's share of a dimension that the ranks of an axis divide."""
    return Span(axis.rank * (size // axis.size), size // axis.size, 0)


def logical_of(tensor: Tensor) -> LogicalTensor:
    """The logical tensor of a parameter or buffer that a `ParameterFactory` made."""
    marks: Any = tensor
    return marks.logical


def shard_index(parameter: Tensor) -> tuple[int, int]:
    """(number of a parameter's shard of its logical tensor, number of shards)."""
    marks: Any = parameter
    return marks.cut


def run_of(parameter: Tensor) -> Span | None:
    """This rank's run of experts, or of a matrix's rows. None where all ranks of the replicas have all."""
    return getattr(parameter, "run", None)


def is_spread(parameter: Tensor) -> bool:
    """Whether it is such a run. Its gradient is summed over the ranks that hold the same run."""
    return run_of(parameter) is not None


def shares_rows(parameter: Tensor) -> bool:
    """Whether it is a run of a matrix's rows."""
    return getattr(parameter, "shares_rows", False)


def on_every_tensor_rank(parameter: Tensor) -> bool:
    """Whether the tensor parallel ranks have the same elements. Experts are cut, or folded over these ranks."""
    return logical_of(parameter).shard is None and (not is_spread(parameter) or shares_rows(parameter))


def is_copy(parameter: Tensor) -> bool:
    """Whether an earlier rank of the grid has the same part, where there are columns."""
    return getattr(parameter, "of_grid", False)


def shard_start(parameter: Tensor) -> int:
    """Where the parameter begins in the flattened shard (`shard_index`) of the logical tensor."""
    run = run_of(parameter)
    return 0 if run is None else run.start * (parameter.numel() // run.length)


def stored_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of a module in a checkpoint: its parameters, each once, and its buffers."""
    return [*dict.fromkeys(module.parameters()), *buffers_of(module)]


def buffers_of(module: nn.Module) -> list[Tensor]:
    """The tensors of a module and its parts that `ParameterFactory.buffer` made, in order."""
    return [
        value
        for each in module.modules()
        for value in (*vars(each).values(), *each._buffers.values())
        if isinstance(value, Tensor) and hasattr(value, "logical")
    ]

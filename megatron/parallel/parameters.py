"""Making parameters: the one place where a logical tensor becomes this rank's `nn.Parameter`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .initial import Init, initial_values
from .mesh import Mesh
from .shard import LogicalTensor, Role, Shard


@dataclass(frozen=True)
class ParameterFactory:
    """Creates this rank's shards of logical tensors, with their initial values.

    Attributes:
        mesh: where this rank stands.
        seed: seed of the run; values are a function of it and of the logical name.
        device: "meta" makes parameters without values.
        dtype: type of parameters that may be rounded; those marked keep_fp32 stay fp32.
        prefix: logical name of the module that asks.
        values: False leaves them out; whoever builds the model fills them in.
    """

    mesh: Mesh
    seed: int = 0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    prefix: str = ""
    values: bool = True

    def scope(self, name: str) -> ParameterFactory:
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
    ) -> nn.Parameter:
        """This rank's shard of the logical tensor `<prefix>.<name>` of (whole) `shape`."""
        logical = LogicalTensor(f"{self.prefix}.{name}" if self.prefix else name, shape, role, shard, keep_fp32, matrices)
        dtype = torch.float32 if keep_fp32 else self.dtype
        at = self.mesh.tensor
        if not self.values or torch.device(self.device).type == "meta":
            local = torch.empty(logical.local_shape(at.rank, at.size), dtype=dtype, device=self.device)
        else:
            local = initial_values(logical, init, self.seed, at.rank, at.size).to(device=self.device, dtype=dtype)
        parameter = nn.Parameter(local)
        parameter.logical = logical
        if shard is not None and at.size > 1:
            # DeepSpeed counts parameters without this mark once per tensor parallel group in the gradient norm.
            parameter.model_parallel = parameter.tensor_model_parallel = True
        return parameter

    def kept(self, name: str, shape: tuple[int, ...], *, role: Role) -> Tensor:
        """A tensor that checkpoints keep and no optimizer sees: fp32, whole on every rank, 0 at the start."""
        tensor = torch.zeros(shape, dtype=torch.float32, device=self.device)
        tensor.logical = LogicalTensor(f"{self.prefix}.{name}" if self.prefix else name, shape, role, keep_fp32=True)
        return tensor


def stored_tensors(module: nn.Module) -> list[Tensor]:
    """All that a checkpoint has of a module: its parameters, each once, and its kept tensors."""
    return [*dict.fromkeys(module.parameters()), *kept_tensors(module)]


def kept_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of a module and its parts that `ParameterFactory.kept` made, in order."""
    return [
        value for each in module.modules() for value in vars(each).values()
        if isinstance(value, Tensor) and hasattr(value, "logical")
    ]

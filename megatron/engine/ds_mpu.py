"""This rank's axes in the words DeepSpeed asks for (its "model parallel unit")."""

from __future__ import annotations

import torch.distributed as dist

from megatron.parallel.mesh import Axis, Mesh, new_group


class ModelParallelUnit:
    """Tensor parallelism is DeepSpeed's model parallelism, and all ranks with the same parameters are its data axis.

    It is told nothing of context parallelism: its own sequence parallelism scales gradients by another factor at ZeRO 3
    than below, and a loss whose labels are weighted needs none.
    """

    def __init__(self, mesh: Mesh):
        self._tensor, self._data = with_group(mesh.tensor, mesh), with_group(mesh.replicas, mesh)

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._tensor.group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._data.group


def with_group(axis: Axis, mesh: Mesh) -> Axis:
    """The axis with a group even where it has one rank, since DeepSpeed communicates on it all the same."""
    if axis.group is not None:
        return axis
    own = new_group([axis.ranks[0]], mesh.timeout)
    return Axis(axis.rank, axis.size, own, axis.ranks)

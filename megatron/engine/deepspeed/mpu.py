"""This rank's axes in the words DeepSpeed asks for (its "model parallel unit")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from megatron.parallel.layout.mesh import Axis, Mesh, new_group


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


@contextmanager
def groups_of_mesh(mesh: Mesh) -> Iterator[None]:
    """DeepSpeed's grid of a pipeline takes this rank's groups from the mesh, and makes none of other ranks.

    It would make every group of every rank, and a second one of all ranks. With NCCL each of them is a collective of
    the whole job: 2,241 calls, one after another, at the start of 8,192 ranks.
    """
    import deepspeed

    axes = (mesh.tensor, mesh.data, mesh.pipeline, mesh.context, mesh.replicas)
    known = {tuple(sorted(axis.ranks)): axis.group for axis in axes if axis.group is not None}

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
        members = tuple(sorted(ranks))
        if len(members) == mesh.layout.world_size:
            return dist.group.WORLD
        if mesh.rank in members and members not in known:
            known[members] = new_group(members, mesh.timeout)
        return known.get(members)

    with mock.patch.object(deepspeed.comm, "new_group", group_of):
        yield

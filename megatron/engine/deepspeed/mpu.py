"""This rank's axes as DeepSpeed's "model parallel unit"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from megatron.parallel.layout.mesh import Axis, Mesh, new_group


class ModelParallelUnit:
    """Tensor parallelism is DeepSpeed's model parallelism, and all ranks with the same parameters are its data axis.

    It does not know context parallelism. DeepSpeed's own sequence parallelism scales gradients differently at ZeRO 3
    than below, and a loss with weighted labels needs no scaling.
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
    """The axis with a group, even for one rank: DeepSpeed communicates on it all the same."""
    if axis.group is not None:
        return axis
    own = new_group([axis.ranks[0]], mesh.timeout)
    return Axis(axis.rank, axis.size, own, axis.ranks)


@contextmanager
def groups_of_mesh(mesh: Mesh) -> Iterator[None]:
    """DeepSpeed's pipeline grid uses the groups of the mesh, and makes none for other ranks.

    It would make every group of every rank, and a second group of all ranks. With NCCL each is a collective of the
    whole job: 2,241 calls, one after another, at the start of 8,192 ranks.
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

"""DeepSpeed's start in a process: its import, the groups of ranks, partitioned parameters, and types that stay."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.variants import used_kinds
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import Axis, Mesh, new_group


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed without compiling or printing. Call once per process, before the process group exists.

    On CPUs, its init_distributed would build an extension that only inference uses. A rank killed meanwhile leaves a
    lock that hangs every later run."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 has deprecated, once per step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import_muon()


def import_muon() -> None:
    """Import DeepSpeed's Muon, which its ZeRO imports and which is unused here.

    Its decorators would import torch's compiler: seconds of every rank's start."""
    from deepspeed.runtime import compiler

    with mock.patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401


@contextlib.contextmanager
def deepspeed_quietly() -> Iterator[None]:
    """DeepSpeed on the existing process group, without its output while it builds."""
    import deepspeed

    with contextlib.redirect_stdout(io.StringIO()):
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
        yield


class ModelParallelUnit:
    """This rank's axes for DeepSpeed.

    Tensor parallelism is its model parallelism, and all ranks with the same parameters are its data axis.
    It does not know context parallelism. DeepSpeed's own sequence parallelism scales gradients differently at ZeRO 3
    than below, and a loss with weighted labels needs no scaling."""

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


@contextlib.contextmanager
def groups_of_mesh(mesh: Mesh) -> Iterator[None]:
    """DeepSpeed's pipeline grid uses the groups of the mesh, and makes none for other ranks.

    It would make every group of every rank, and a second group of all ranks. With NCCL each is a collective of the
    whole job: 2,241 calls, one after another, at the start of 8,192 ranks."""
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


@contextlib.contextmanager
def cut_as_they_are_made(config: Config, options: dict[str, Any], mpu: ModelParallelUnit) -> Iterator[None]:
    """Partition each parameter when its module has been made, so that no rank ever holds the whole model.

    Parameters keep their types. DeepSpeed's override of types would be one for all."""
    import deepspeed

    for _, kind, _ in used_kinds(config.model):
        kind.module  # noqa: B018  (imported before zero.Init changes how modules are made)
    overrides = [deepspeed.runtime.zero.partition_parameters.DeepSpeedTensorOverride.device]
    with (
        _classes_as_they_were(),
        deepspeed.zero.Init(
            data_parallel_group=mpu.get_data_parallel_group(),
            config_dict_or_path=options,
            mpu=mpu,
            tensor_overrides=overrides,
        ),
    ):
        yield


def cut_parameters(model: nn.Module, options: dict[str, Any], mpu: ModelParallelUnit, device: torch.device) -> None:
    """Partition the parameters of a finished model, one after another, with the values of the first rank.

    A device never has the whole model. Other ranks than the first may have parameters without memory of their own.
    Modules whose tokens choose what runs (`gathered_whole` of the model) are gathered as one, on all ranks alike."""
    import deepspeed

    for module in cast(tuple[nn.Module, ...], getattr(model, "gathered_whole", ())):
        deepspeed.utils.set_z3_leaf_module(module, True)
    group = mpu.get_data_parallel_group()
    with _classes_as_they_were():
        made = deepspeed.zero.Init(module=nn.Module(), data_parallel_group=group, config_dict_or_path=options, mpu=mpu)
        for parameter in dict.fromkeys(model.parameters()):
            values = (
                parameter.data if dist.get_rank(group) == 0 else torch.empty(parameter.shape, dtype=parameter.dtype)
            )
            parameter.data = values.to(device).contiguous()
            made._convert_to_zero_parameters([parameter])


@contextlib.contextmanager
def _classes_as_they_were() -> Iterator[None]:
    """Removes the `__init_subclass__` that zero.Init adds to `nn.Module` and leaves there. With it, no generic class
    of modules can be made."""
    own = "__init_subclass__" in vars(nn.Module)
    try:
        yield
    finally:
        if not own and "__init_subclass__" in vars(nn.Module):
            del nn.Module.__init_subclass__


class TypedBuffers:
    """One buffer per type, in the place of DeepSpeed's flat buffer of all partitions.

    Args:
        make: makes a contiguous buffer of tensors of one type and lets them point into it.
        tensors: in the order in which DeepSpeed counts their elements.
    """

    def __init__(self, make: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]):
        sizes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        self.buffers = {
            dtype: make([t for t in tensors if t.dtype == dtype]) for dtype in dict.fromkeys(d for d, _ in sizes)
        }
        self.place: dict[int, tuple[torch.dtype, int]] = {}  # element number among all -> (type, number among its type)
        begin, used = 0, dict.fromkeys(self.buffers, 0)
        for dtype, size in sizes:
            self.place.setdefault(begin, (dtype, used[dtype]))
            begin, used[dtype] = begin + size, used[dtype] + size

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """A run of elements of one type that begins with a tensor, such as a parameter group."""
        dtype, begin = self.place[start]
        return self.buffers[dtype].narrow(dim, begin, length)


@contextlib.contextmanager
def keeping_fp32(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """An engine of bf16 or fp16 that is built inside this context keeps parameters with `keep_fp32` in fp32.

    DeepSpeed 0.19.8 casts every parameter of a module (its `keep_in_fp32_modules` is only for buffers), and under
    ZeRO 3 puts them into one buffer of one type. Its optimizers treat each parameter group in its own type, and
    `parameter_groups` separates types. So only two steps of its start are changed.
    """
    kept = [parameter for parameter in parameters if logical_of(parameter).keep_fp32]
    if not kept:
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3

    cast, defragment = DeepSpeedEngine._cast_module_mixed_precision, stage3.defragment

    def cast_others(engine: Any, *args: Any, **kwargs: Any) -> None:
        values = [parameter.data for parameter in kept]
        cast(engine, *args, **kwargs)
        for parameter, value in zip(kept, values):
            parameter.data = value

    with (
        mock.patch.object(DeepSpeedEngine, "_cast_module_mixed_precision", cast_others),
        mock.patch.object(stage3, "defragment", lambda tensors: TypedBuffers(defragment, tensors)),
    ):
        yield

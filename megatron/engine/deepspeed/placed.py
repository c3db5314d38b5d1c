"""ZeRO 2 and 3 of pipeline stages: a table of instructions says when gradients are scattered and weights gathered.

DeepSpeed 0.19.8 refuses both with a pipeline. Here it runs ZeRO 2's optimizer on parts of flat tensors. A bucket has
parameters of one stage (`Pipeline.bucket_of`). It is reduce-scattered after a backward pass of its stage, or after the
last one of a step, and its gradients are freed. At ZeRO 3 its weights have memory only between the instruction that
gathers the stage and the one that releases it. Otherwise the storage of the flat tensor is empty. Views of it stay
valid, also in autograd's graph."""

from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.arithmetic.pipelines import GATHER, REDUCE, Instruction
from megatron.parallel.layout.mesh import Mesh

from .buckets import finished
from .scattered import Bucket, ScatteredGradients
from .stages import Pipeline


class PlacedZero(ScatteredGradients):
    """Takes over the reduction of a pipeline engine, and the weights of its stages.

    Args:
        engine: DeepSpeed's, at ZeRO 2.
        each: whether gradients are reduced after each backward pass, and not once in a step.
        wire: the type in which gradients are sent.
        cuts_weights: ZeRO 3.
    """

    def __init__(
        self, engine: Any, mesh: Mesh, passes: int, each: bool, wire: torch.dtype, *, cuts_weights: bool
    ) -> None:
        pipeline: Pipeline = engine.module
        self._stages: dict[int, tuple[int, ...]] = {}  # by identity of a bucket
        super().__init__(engine, mesh, finished(pipeline), passes, each, wire)
        self._of_stage: dict[int, list[tuple[Bucket, Weights | None]]] = {}
        for number, bucket in enumerate(self.buckets):
            own = Weights(engine.optimizer, number, bucket) if cuts_weights else None
            self._stages[id(bucket)] = pipeline.stages_of(next(iter(bucket.parameters)))
            for stage in self._stages[id(bucket)]:
                self._of_stage.setdefault(stage, []).append((bucket, own))
        self._copies = [(self._bucket_of[cast(nn.Parameter, weight)].own, group) for weight, group in pipeline.tied]
        if cuts_weights:
            self.gathers.leave()
            _gather_nothing(engine.optimizer)
        self.begin()

    @property
    def each(self) -> bool:
        return self._each

    def begin(self, passes: int | None = None) -> None:
        super().begin(passes)
        self._sums = True
        for bucket in self.buckets:
            bucket.own.zero_()
            bucket.missing = len(self._stages.get(id(bucket), ()))

    def _add(self, parameter: nn.Parameter) -> None:
        """A gradient stays where autograd adds it up, until it is reduced."""

    @torch.no_grad()
    def execute(self, it: Instruction) -> None:
        """Reduce the gradients of a stage, or gather or release its weights. All replicas of a stage do it together."""
        for bucket, weights in self._of_stage.get(it.stage, ()):
            if it.kind == REDUCE:
                bucket.missing -= 1
                if self._each or not bucket.missing:
                    self._scatter(bucket)
            elif weights is not None:
                (weights.gather if it.kind == GATHER else weights.release)(it.stage)

    def _scatter(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            self._keep(bucket, parameter)
            self._release()
        self._send(bucket)
        bucket.seen, bucket.sent = set(), False

    @torch.no_grad()
    def sum_copies(self) -> None:
        """Each rank's part of a weight that other ranks of the pipeline have too is summed over them."""
        self._finish()
        for own, group in self._copies:
            dist.all_reduce(own, group=group)

    def _finish(self) -> None:
        while self._flying:
            self._receive()
        self.gathers.settle()


class Weights:
    """The weights of a bucket: this rank's part, and all of them while a stage uses them."""

    def __init__(self, zero: Any, number: int, bucket: Bucket) -> None:
        # memory of its own: that of a parameter, which was filled from numpy, cannot be freed
        self._flat: Tensor = zero.bit16_groups_flat[number].clone()
        for parameter, begin in bucket.parameters.items():
            parameter.data = self._flat[begin : begin + parameter.numel()].view(parameter.shape)
            linked = getattr(parameter, "_hp_mapping", None)  # of DeepSpeed: a view that would keep the old memory
            if linked is not None:
                at = linked.lp_fragment_address
                linked.lp_fragment = parameter.data.flatten()[at.start : at.start + at.numel]
        zero.bit16_groups_flat[number] = self._flat
        self._group, self._users = zero.real_dp_process_group[number], set[int]()
        parts, master = zero.parallel_partitioned_bit16_groups[number], zero.single_partition_of_fp32_groups[number]
        narrow = self._flat.dtype != master.dtype
        self._own: Tensor = parts[dist.get_rank(self._group)].detach().clone() if narrow else master.detach()
        zero.parallel_partitioned_bit16_groups[number] = [self._own] * len(parts)  # where an update writes
        self._bytes = self._flat.untyped_storage().nbytes()
        self._flat.untyped_storage().resize_(0)

    def gather(self, stage: int) -> None:
        if not self._users:
            self._flat.untyped_storage().resize_(self._bytes)
            dist.all_gather_into_tensor(self._flat, self._own, group=self._group)
        self._users.add(stage)

    def release(self, stage: int) -> None:
        self._users.discard(stage)
        if not self._users:
            self._flat.untyped_storage().resize_(0)


def _gather_nothing(zero: Any) -> None:
    """New masters change this rank's parts only, where DeepSpeed would gather all."""
    from deepspeed.runtime.zero import stage_1_and_2

    refresh = zero.update_lp_params

    def changed() -> None:
        with mock.patch.object(stage_1_and_2, "all_gather_dp_groups", lambda **_: None):
            refresh()

    zero.update_lp_params = changed
    zero._update_model_bit16_weights = lambda group: None  # parameters are views of the flat tensors for good

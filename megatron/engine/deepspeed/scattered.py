"""Gradients of ZeRO 1 and 2 are reduce-scattered in buckets while the backward pass continues.

DeepSpeed 0.19.8 all-reduces at both stages, at stage 1 in bf16 the whole fp32 gradient after the last backward pass.
Here each parameter group is a bucket (`buckets.in_buckets`): DeepSpeed lays a group out as one flat tensor, and
each rank updates an equal part. A bucket whose gradients are complete is reduce-scattered straight into these parts.
That is half the bytes of an all-reduce. On an accelerator the message runs under the rest of the backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.parameters import logical_of, on_every_tensor_rank
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.transport.routes import installed_routes
from megatron.parallel.transport.shared_sums import averages

from .expert_groups import norm_of_parts
from .gathers import LateGathers
from .one_pass import SumsInFewKernels
from .step_on_device import on_gpu
from .sum_of_squares import sum_of_squares

FLYING = 2  # buckets on their way, where each has memory of its own


@dataclass
class Bucket:
    """One parameter group."""

    parameters: dict[nn.Parameter, int]  # each with its first element in the flat tensor
    own: Tensor  # [n / ranks] the sums of this rank's part, fp32
    size: int  # n, elements of the flat tensor with its padding
    group: Any  # the ranks that have the same parameters
    flat: Tensor | None = None  # [n] this rank's gradients, one behind the other. None before the first one.
    seen: set[nn.Parameter] = field(default_factory=set)  # parameters that have a gradient in `flat`
    missing: int = 0  # gradients that are still to come
    sent: bool = False

    def place(self, parameter: nn.Parameter) -> Tensor:
        """Where a parameter's gradient lies in the flat tensor, in its shape."""
        assert self.flat is not None
        begin = self.parameters[parameter]
        return self.flat[begin : begin + parameter.numel()].view(parameter.shape)

    def pieces(self) -> list[tuple[nn.Parameter | None, Tensor]]:
        """This rank's part: views of it, by parameter, and what pads it."""
        begin = self.own.numel() * dist.get_rank(self.group)
        end, found, filled = begin + self.own.numel(), list[tuple[nn.Parameter | None, Tensor]](), 0
        for parameter, at in self.parameters.items():
            first, last = max(at, begin), min(at + parameter.numel(), end)
            if first < last:
                found.append((parameter, self.own[first - begin : last - begin]))
                filled = last - begin
        if filled < self.own.numel():
            found.append((None, self.own[filled:]))
        return found


class ScatteredGradients:
    """Takes over the reduction of an engine.

    Args:
        engine: DeepSpeed's, at ZeRO 1 or 2.
        finished: parameters in the order in which the backward pass finishes their gradients.
        passes: micro-batches in a step.
        each: whether each micro-batch is reduced: a rank then keeps its part only.
        wire: the type in which gradients are sent.
        late: all buckets are sent after the last backward pass. So are those whose parameters `tied` has, which the
            pipeline adds up first.
        kernels: of `passes_of_adamw`. They add several gradients at once.
    """

    def __init__(
        self,
        engine: Any,
        mesh: Mesh,
        finished: Sequence[nn.Parameter],
        passes: int,
        each: bool,
        wire: torch.dtype,
        late: bool = False,
        kernels: Any | None = None,
    ) -> None:
        self._engine, self._zero, self._mesh = engine, engine.optimizer, mesh
        self._each, self._wire, self._passes = each, wire, passes
        self._cut: bool = engine.zero_optimization_stage() == 2
        self._few = None  # where a pipeline's stages share a weight, DeepSpeed reads what lies in `grad`
        if mesh.pipeline.size == 1 and on_gpu(engine.optimizer):
            self._few = SumsInFewKernels(None if self._cut else kernels)
        self._arrived: dict[nn.Parameter, int] = {}
        self._spent: nn.Parameter | None = None
        self._flying: list[tuple[Bucket, Any, float, Tensor, Tensor]] = []
        self._sums = False  # whether the parts have sums of an earlier micro-batch
        self.buckets = self._made()
        place = {parameter: number for number, parameter in enumerate(finished)}
        tied = {weight for weight, _ in getattr(engine.module, "get_tied_weights_and_groups", list)()}
        held = {id(each) for each in self.buckets if late or tied & each.parameters.keys()}

        def turn(bucket: Bucket) -> tuple[bool, int]:
            return id(bucket) in held, max(place[parameter] for parameter in bucket.parameters)

        self._order = sorted(self.buckets, key=turn)
        self._early = len(self.buckets) - len(held)  # buckets that are sent during the backward pass
        self._bucket_of = {parameter: each for each in self.buckets for parameter in each.parameters}
        self._more: dict[nn.Parameter, int] = getattr(engine.module, "passes_of_weights", dict)()
        self._take_over()
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._add)
        self.gathers = LateGathers(self._zero, engine.module, self.buckets, self._order)
        self.begin()

    def _made(self) -> list[Bucket]:
        zero, found = self._zero, list[Bucket]()
        narrow = hasattr(zero, "bf16_groups")
        flats = zero.bf16_groups_flat if narrow else zero.bit16_groups_flat
        for number, parameters in enumerate(zero.bf16_groups if narrow else zero.bit16_groups):
            size, group = flats[number].numel(), zero.real_dp_process_group[number]
            part, rank = size // dist.get_world_size(group), dist.get_rank(group)
            flat = None
            if narrow:
                flat = zero.fp32_groups_gradients_flat[number]
            elif not self._cut:
                flat = torch.zeros(size, dtype=torch.float32, device=flats[number].device)
            begins, begin = dict[nn.Parameter, int](), 0
            for parameter in parameters:
                begins[parameter] = begin
                begin += parameter.numel()
            own = flats[number].new_zeros(part, dtype=torch.float32) if flat is None else flat[rank * part :][:part]
            found.append(Bucket(begins, own, size, group, flat))
        return found

    def _take_over(self) -> None:
        """Put methods of this object in the place of DeepSpeed's."""
        engine, zero = self._engine, self._zero
        for hook in zero._grad_acc_hooks:
            hook.remove()
        zero._grad_acc_hooks = []
        zero.scattered_gradients = [each.own if each.flat is None else each.flat for each in self.buckets]
        pieces = [each.pieces() for each in self.buckets]
        if hasattr(zero, "bf16_groups"):
            counted = [
                part for own in pieces for parameter, part in own if parameter is not None and self._counts(parameter)
            ]
            owns = [each.own for each in self.buckets]

            def grads_for_norm(for_clipping: bool = False) -> Any:
                return owns if for_clipping else ([self._norm(counted)], {})

            for each in self.buckets:
                for parameter in each.parameters:
                    parameter._hp_grad = each.place(parameter).view(-1)  # type: ignore[attr-defined]
            zero.get_grads_for_norm = grads_for_norm
            zero.update_hp_grads = zero.clear_hp_grads = lambda *_, **__: None
            zero.clear_lp_grads = lambda *_, **__: self._release()
            engine.buffered_allreduce_fallback = lambda *_, **__: self._finish()
            return
        parts = [[_padding(part) if parameter is None else part for parameter, part in own] for own in pieces]

        def reduced(*_: Any, **__: Any) -> None:
            if self._each or engine.is_gradient_accumulation_boundary():
                self._finish()
            if engine.is_gradient_accumulation_boundary():
                zero.averaged_gradients = dict(enumerate(parts))
                self._sums = False

        zero.reduce_gradients = zero.overlapping_partition_gradients_reduce_epilogue = reduced
        zero.backward_prologue = self._release  # a gradient that stayed would be part of the next one
        zero._get_preflattened_grad_partition = lambda group: self.buckets[group].own
        zero.scaled_global_norm = lambda norm_type=2: norm_of_parts(zero)

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's part of a parameter counts in the norm: replicas and tied copies count once."""
        copy = on_every_tensor_rank(parameter) and self._mesh.tensor.rank > 0
        return not copy and not getattr(parameter, "ds_pipe_replicated", False)

    def _norm(self, parts: list[Tensor]) -> Tensor:
        """Norm of the gradients of this stage's tensor parallel rank. DeepSpeed adds the others."""
        squares = sum_of_squares(parts) if parts else self.buckets[0].own.new_zeros(())
        return all_reduce(squares, self._mesh.replicas).sqrt().view(1)

    def begin(self, passes: int | None = None) -> None:
        """A step begins: no gradient exists.

        Args:
            passes: the micro-batches that it has, if that changes.
        """
        self._passes = passes or self._passes
        self._needed = 1 if self._each or self._cut else self._passes  # arrivals that fill a place
        self._flying, self._sums = [], False
        self.gathers.begin()
        self._reset()

    def _reset(self) -> None:
        self._spent, self._next = None, 0
        self._arrived = dict.fromkeys(self._bucket_of, 0)
        for parameter in self._bucket_of:
            parameter.grad = None
        for each in self.buckets:
            each.missing = self._needed * sum(self._more.get(parameter, 1) for parameter in each.parameters)
            each.seen, each.sent = set(), False
            if self._cut:
                each.flat = None

    @torch.no_grad()
    def _add(self, parameter: Any) -> None:
        """A gradient of a micro-batch is there."""
        bucket = self._bucket_of[parameter]
        if bucket.sent:
            raise RuntimeError(f"{logical_of(parameter).name} got a gradient after its bucket was sent")
        self._arrived[parameter] += 1
        if self._cut and not self._each and self._arrived[parameter] < self._passes:
            return  # it is kept, and grows, until the last micro-batch
        self._release()
        self._keep(bucket, parameter)
        bucket.missing -= 1
        while self._next < self._early and not self._order[self._next].missing:
            self._send(self._order[self._next])

    def _keep(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Add a gradient to the sum of earlier micro-batches."""
        if bucket.flat is None:
            bucket.flat = bucket.own.new_empty(bucket.size, dtype=self._wire)
            last = max(begin + each.numel() for each, begin in bucket.parameters.items())
            bucket.flat[last:].zero_()
        place, gradient = bucket.place(parameter), parameter.grad
        if gradient is None:
            place.zero_()
        elif gradient.untyped_storage()._cdata != place.untyped_storage()._cdata:
            same, first = gradient.dtype == place.dtype, parameter not in bucket.seen
            if self._few is not None:
                self._few.add(place.view(-1), gradient, first)
            else:
                place.copy_(gradient) if first else place.add_(gradient)
            if same and not self._cut and self._few is None:
                parameter.grad = place  # further ones are added there
            else:
                self._spent = parameter  # hooks after this one may read it
        bucket.seen.add(parameter)

    def _release(self) -> None:
        if self._spent is not None:
            self._spent.grad, self._spent = None, None

    def _send(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters.keys() - bucket.seen:
            self._keep(bucket, parameter)
        if self._few is not None:
            self._few.flush()
        assert bucket.flat is not None
        whole, out = bucket.flat.to(self._wire), bucket.own
        apart = self._cut or whole is not bucket.flat
        if apart or installed_routes() is not None:  # whose algorithms may write a part before they have read it
            out = whole.new_empty(bucket.own.numel())
        work, ranks, share = None, dist.get_world_size(bucket.group), 1 / self._mesh.replicas.size
        if ranks == 1:
            out = whole
        else:  # a rank that shares memory with the others adds its part itself, so nothing is gained by waiting later
            op, at_once = dist.ReduceOp.SUM, averages(bucket.group, whole)
            if at_once and installed_routes() is None:  # tables do not know averages
                op, share = dist.ReduceOp.AVG, ranks * share
            work = dist.reduce_scatter_tensor(out, whole, op=op, group=bucket.group, async_op=not at_once)
        bucket.sent, self._next = True, self._next + 1
        self._flying.append((bucket, work, share, out, whole))
        if self._cut:
            bucket.flat = None
        if apart:
            while len(self._flying) > FLYING:
                self._receive()

    def _receive(self) -> None:
        bucket, work, share, out, _ = self._flying.pop(0)
        if work is not None:
            work.wait()
        if self._sums:
            bucket.own.add_(out, alpha=share)
            return
        if out is not bucket.own:
            bucket.own.copy_(out)
        if share != 1:
            bucket.own.mul_(share)

    @torch.no_grad()
    def _finish(self) -> None:
        """The backward pass has ended: send the rest, and wait for all sums."""
        while self._next < len(self._order):
            self._send(self._order[self._next])
        while self._flying:
            self._receive()
        self.gathers.settle()  # weights of blocks without a forward pass in this step
        self._sums = self._cut and self._each
        self._reset()


def _padding(part: Tensor) -> Any:
    """Elements that are no parameter's, as DeepSpeed marks them."""
    marked: Any = part.detach()
    marked._zero_padding = True
    return marked

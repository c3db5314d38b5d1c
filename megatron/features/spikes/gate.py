"""Decides just before an update whether it is applied: the last moment at which skipping it costs nothing.

Under every ZeRO stage and in the pipeline, DeepSpeed computes the gradient norm, clips, and calls the `step` of the
torch optimizer. ZeRO 1 to 3 call it once per parameter group. The gate wraps that method. At the first call of a step
all ranks add up their losses in one small collective, so that all decide by the same bits. In a run, this is the
exchange of the step's numbers. Where each rank knows the norm to the last bit, the message is sent before the last
backward pass (`begin_to_meet`). For a skipped update the calls do nothing. Weights, moments and the optimizer's count
of updates stay unchanged. DeepSpeed then updates the weights of the forward pass from the same masters, which gives the
same weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.engine.base import BaseEngine
from megatron.engine.part import EnginePart, Update
from megatron.engine.protocol import CLIP, NORM, Spike
from megatron.engine.replicas import hash_bits
from megatron.parallel.messages.account import phase

from .options import ADAGC, spikes_of
from .rule import AdaGC, SpikeRule

Number = Tensor | float
Meet = Callable[[Number, Number, Number], tuple[float, float]]


class OwnGradients:
    """A hash of the gradients of a step as a rank computes them: of every micro-batch, before any sum."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._handles = [
            each.register_hook(partial(self._add, 2 * n + 1)) for n, each in enumerate(parameters) if each.requires_grad
        ]

    def _add(self, factor: int, gradient: Tensor) -> None:
        self._total += factor * hash_bits(gradient.contiguous())

    def take(self) -> int:
        """The hash. Ends the hashing."""
        for each in self._handles:
            each.remove()
        return int(self._total)


class StepGate(EnginePart):
    """Wraps the `step` of an optimizer.

    Attributes:
        meet: (this rank's mean loss, its labels, the gradient norm) -> the step's mean loss and norm, the same on all
        ranks. All ranks call it. The norm is that of rank 0. A trainer sets its own, which exchanges further numbers.
        begin_to_meet: (this rank's mean loss, its labels) -> a function of the norm that waits for it and for the mean
            loss of the step. A trainer sets it where ranks need not exchange the norm.
        adagc: clips each tensor, if the run asks for it.
        prepared: whether `prepare` was called for the next step.
    """

    def __init__(self) -> None:
        self.meet: Meet = self._meet
        self.begin_to_meet: Callable[[Number, Number], Callable[[Number], tuple[float, float]]] | None = None
        self._with: Callable[[Number], tuple[float, float]] | None = None  # of the current step, if it is on its way
        self.found: Spike | None = None
        self.adagc: AdaGC | None = None
        self._size = 0.0  # the gradient norm, as all ranks know it
        self._decided = True
        self._factor: float | None = None
        self._trial = self._next = self.prepared = False
        self._prints: list[Tensor] | None = None
        self._reduced = False  # whether prints are taken as soon as gradients are reduced
        self._own: OwnGradients | None = None

    def before_deepspeed(self, engine: BaseEngine) -> None:
        """Wrap the optimizer's `step`. At ZeRO 0 our clipping then runs here: the gate needs the gradients from
        before it, and its norm."""
        config, self._engine = engine.config, engine
        self._options = spikes_of(config)
        self.rule, self._judges = SpikeRule(self._options), self._options.judges
        self._config, self._mesh, self._device = config, engine.mesh, engine.device
        self._clipping, engine.clips = engine.clipping, False
        optimizer = engine.optimizer
        update = optimizer.step

        def step(closure: Any = None) -> Any:
            if self._prints is not None and not self._reduced:
                self._take_prints(p.grad for group in optimizer.param_groups for p in group["params"])
            if self._clipping is not None:
                self._clipping()
            if self._trial:
                return None
            self._decide()
            if self.found is not None and self.found.leaves_out:
                return None
            if self.adagc is not None:
                with phase("exchange"):
                    self.adagc(optimizer, self._size)
            if self._factor is not None:
                grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                torch._foreach_mul_(grads, self._factor)
            return update(closure)

        gated, own = cast(Any, optimizer), cast(Any, step)  # this object, not its class
        own.needs_clipped = self._options.action == ADAGC
        gated.step = step

    def attach(self, engine: BaseEngine) -> None:
        """Take prints of ZeRO's gradients before they are clipped: one wrong bit changes the norm of all ranks, and
        by it all gradients."""
        if self._options.action == ADAGC:
            limit = self._config.optimizer.gradient_clipping
            self.adagc = AdaGC(self._options.adagc, limit, engine.state, self._mesh, self._device)
        zero = engine.deepspeed.optimizer
        clip: Any = zero.unscale_and_clip_grads if hasattr(zero, "averaged_gradients") else None  # ZeRO 1 to 3
        shares: Any = getattr(zero, "fp32_groups_gradient_flat_partition", None)
        self._reduced = clip is not None or shares is not None

        def clipped(which: Any, norm: Any) -> Any:
            if self._prints is not None:
                self._take_prints(which if isinstance(which, list) else [zero.fp32_partitioned_groups_flat[which].grad])
            return clip(which, norm)

        def step(*arguments: Any, **options: Any) -> Any:
            if self._prints is not None:
                self._take_prints(shares)
            return update(*arguments, **options)

        if clip is not None:
            zero.unscale_and_clip_grads = clipped
        elif shares is not None:  # the bf16 optimizer's
            update, zero.step = zero.step, step

    def prepare(self, *, trial: bool, own: Sequence[nn.Parameter] = (), hashes: bool = True) -> None:
        """Keep a hash of the gradients of the next step, and with `trial` skip its update.

        Args:
            own: parameters whose gradients are also hashed as this rank computes them.
            hashes: False keeps none.
        """
        self.prepared, self._next, self._prints = True, trial, [] if hashes else None
        self._own = OwnGradients(own, self._device) if own else None

    def own_gradients(self) -> int:
        """A hash of this rank's own gradients in the last step that was prepared for it."""
        found, self._own = self._own, None
        return 0 if found is None else found.take()

    def gradients(self) -> int:
        """A hash of the optimizer's gradients in the last prepared step, after they were reduced and before they
        were clipped."""
        prints, self._prints = torch.stack(self._prints).tolist() if self._prints else [], None
        return sum((2 * number + 1) * each for number, each in enumerate(prints)) % 2**64

    @property
    def trial(self) -> bool:
        """Whether the current step is computed without its update."""
        return self._trial

    @property
    def applies(self) -> bool:
        """Whether the gate applies the current step's update."""
        return not self._trial and not (self.found is not None and self.found.leaves_out)

    def before_step(self, step: int, micro_batches: int) -> None:
        self.found, self._decided, self._factor, self._with = None, False, None, None
        self._trial, self._next, self.prepared = self._next, False, False
        if self.adagc is not None:
            self.adagc.begin()

    def losses_known(self) -> None:
        if self.begin_to_meet is not None:
            self._with = self.begin_to_meet(*self._own_loss())

    def after_update(self, update: Update) -> Mapping[str, Any]:
        """Without an overflow of fp16, DeepSpeed skips updates only for a non-finite norm."""
        if not update.applied and not self._decided and not self._trial and self._config.precision.compute != "fp16":
            self.found = Spike(NORM, float("inf"), None, self._options.non_finite)
        self._decided = True
        update.applied, update.spike = update.applied and self.applies, self.found
        if self.adagc is not None:
            self.adagc.finish(update.applied)
        return {}

    def state(self) -> dict[str, Any]:
        return {**self.rule.state(), **({} if self.adagc is None else {ADAGC: self.adagc.state()})}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rule.restore(state)
        if self.adagc is not None:
            self.adagc.restore(state.get(ADAGC, {}))

    def _take_prints(self, grads: Iterable[Tensor | None]) -> None:
        assert self._prints is not None
        self._prints += [hash_bits(each) for each in grads if each is not None]

    def _decide(self) -> None:
        if self._decided or not self._judges:
            return
        self._decided = True
        zero = self._engine.deepspeed.optimizer
        norm = self._clipping.norm if self._clipping else zero._global_grad_norm
        size: Number = 0.0 if norm is None else norm
        loss, size = self.meet(*self._own_loss(), size) if self._with is None else self._with(size)
        self._size = size
        self.found, bound = self.rule.judge(loss, None if norm is None else size)
        if self.found is not None and self.found.action == CLIP and bound is not None:
            most = self._config.optimizer.gradient_clipping
            now = min(size, most) if most > 0 else size
            self._factor = bound / now if bound < now else None

    def _own_loss(self) -> tuple[Number, Number]:
        """The mean loss of this rank's labels, and their weight."""
        losses = self._engine.losses
        return (losses.mean, losses.labels) if self._engine.reports else (0.0, 0.0)

    @phase("exchange")
    def _meet(self, loss: Number, labels: Number, norm: Number) -> tuple[float, float]:
        """For engines without a trainer."""
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        if labels:
            sums[0], sums[1] = loss * labels, labels
        if self._mesh.rank == 0:
            sums[2] = norm
        if self._mesh.layout.world_size > 1:
            dist.all_reduce(sums)
        total, count, size = sums.tolist()
        return (total / count if count else 0.0), size  # a rehearsal counts no labels: its loss is no spike

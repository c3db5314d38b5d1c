"""Executes a table of instructions (`config.arithmetic.pipelines`) in the place of DeepSpeed's pipeline schedule.

DeepSpeed's pipeline engine has one stage per rank and blocking messages. Here a rank may have several stages, and
messages are asynchronous. Everything else stays DeepSpeed's: a pass's precision and scale, sums of gradients over
micro-batches and replicas, copies of tied weights, the optimizer. Shapes follow from the batch, so none are sent."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.config.arithmetic.pipelines import BACKWARD as B
from megatron.config.arithmetic.pipelines import FORWARD as F
from megatron.config.arithmetic.pipelines import (
    OF_ZERO,
    WEIGHTS,
    Instruction,
    Message,
    Round,
    forward_only,
    is_split,
    ranks_of_stages,
    rounds,
    table_of,
    with_zero,
)
from megatron.config.arithmetic.pipelines import REDUCE as REDUCE_GRAD
from megatron.parallel.layers.later import LaterGradients, Waiting, accumulate
from megatron.parallel.messages.account import phase
from megatron.worker.beacon import BACKWARD, FORWARD, OPTIMIZER, REDUCE, Beacon

from .pipeline_schedule import Look
from .placed import PlacedZero
from .stages import Pipeline, stream_buffers

Feed = Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
Place = tuple[int, int]  # stage, micro-batch
Arriving = list[tuple[Tensor, Any]]  # tensors, and their messages
Sent = list[tuple[Tensor, Any, Message]]
SENT = 4  # tensors on their way per stage, on CPUs


class TableExecutor:
    """One rank's part of all tables of a run.

    Args:
        engine: DeepSpeed's pipeline engine around `pipeline`.
        reduction: what has taken over its reduction of gradients, if anything.
    """

    def __init__(self, engine: Any, pipeline: Pipeline, beacon: Beacon, reduction: object = None) -> None:
        self._placed = reduction if isinstance(reduction, PlacedZero) else None
        self._engine, self._pipeline, self._beacon = engine, pipeline, beacon
        self._axis, self._config = pipeline.plan.mesh.pipeline, pipeline.plan.config
        self._stages = len(pipeline.parts) - 1
        self._known: dict[tuple[str, int], list[Round]] = {}
        # DeepSpeed divides a gradient by the number of micro-batches where it thinks that the loss is
        engine.is_last_stage = lambda: pipeline.stage == self._stages - 1
        self._later: LaterGradients | None = None
        if is_split(self._config.parallel, engine.gradient_accumulation_steps()):
            self._later = LaterGradients()
            self._later.use_in(pipeline)
        self._forget()

    def _forget(self) -> None:
        self._inputs: dict[Place, Arriving] = {}
        self._gradients: dict[Place, Arriving] = {}
        self._kept: dict[Place, tuple[tuple[Tensor, ...], Any]] = {}  # inputs and outputs of forward passes
        self._made: dict[Instruction, tuple[Tensor, ...]] = {}  # what is about to be sent
        self._waiting: dict[Place, Waiting] = {}  # factors of gradients of weights
        self._sent: Sent = []

    def train(self, feed: Feed, micro_batches: int, sizes: tuple[int, int], look: Look | None) -> None:
        """A step: all passes, the sums of gradients, and the update.

        Args:
            feed: inputs and labels of each micro-batch.
            sizes: samples of a micro-batch, and positions of each that this rank has.
        """
        self._engine.module.train()
        made = self._rounds("train", micro_batches)
        self._run(made, feed, sizes, look)
        with phase("backward"):
            self._beacon.at(REDUCE, len(made), len(made), b"ReduceGrads")
            if self._placed is None:
                self._engine._exec_reduce_tied_grads()
            else:
                self._placed.sum_copies()
            self._engine._exec_reduce_grads()
        self._beacon.at(OPTIMIZER, len(made), len(made))
        with phase("update"):
            self._engine._exec_optimizer_step()

    def evaluate(self, feed: Feed, micro_batches: int, sizes: tuple[int, int]) -> None:
        """Forward passes only."""
        self._engine.module.eval()
        self._run(self._rounds("evaluate", micro_batches), feed, sizes, None)

    def _rounds(self, use: str, micro_batches: int) -> list[Round]:
        if (use, micro_batches) not in self._known:
            parallel = self._config.parallel
            table = (
                table_of(parallel, micro_batches)
                if use == "train"
                else forward_only(ranks_of_stages(parallel), micro_batches)
            )
            if self._placed is not None:
                zero, each = self._config.zero.stage, self._placed.each
                table = [with_zero(own, zero, each) for own in table]
            self._known[use, micro_batches] = rounds(table, self._stages)
        return self._known[use, micro_batches]

    def _run(self, made: list[Round], feed: Feed, sizes: tuple[int, int], look: Look | None) -> None:
        self._forget()
        homes = ranks_of_stages(self._config.parallel)
        first, last = itertools.tee(feed) if homes[0] == homes[-1] else (feed, feed)
        for number, each in enumerate(made):
            if number and look is not None:
                look(number, len(made))
            it = each.instructions[self._axis.rank]
            if it is not None and it.kind in OF_ZERO and self._placed is not None:
                with phase("backward" if it.kind == REDUCE_GRAD else "forward"):
                    self._beacon.at(REDUCE, number + 1, len(made), f"{it.kind} of stage {it.stage}".encode())
                    self._placed.execute(it)
            elif it is not None:
                self._execute(it, first if it.stage == 0 else last, (number + 1, len(made)))
            for message in each.messages:
                if message.source == message.to == self._axis.rank:
                    self._keep(message)
                elif message.source == self._axis.rank:
                    self._send(message)
                elif message.to == self._axis.rank:
                    self._receive(message, sizes)
            self._release_sent()
        self._wait_for_sent(self._sent)
        self._forget()

    def _release_sent(self) -> None:
        """Free the memory of messages that have been received. gloo only reports one that is waited for. Its receive
        was posted in the same round, and waits for nothing of a later one."""
        self._sent = [each for each in self._sent if not each[1].is_completed()]
        if self._engine.device.type == "cpu":
            early = max(len(self._sent) - SENT * self._stages, 0)
            self._wait_for_sent(self._sent[:early])
            del self._sent[:early]

    def _wait_for_sent(self, sent: Sent) -> None:
        for tensor, work, message in sent:
            with self._beacon.message(b"send", tensor.numel(), self._axis.ranks[message.to], str(message.made)):
                work.wait()

    def _execute(self, it: Instruction, feed: Feed, at: tuple[int, int]) -> None:
        forward, name = it.kind == F, f"{it}, stage {it.stage}, micro-batch {it.micro_batch}"
        part, arriving = FORWARD if forward else BACKWARD, self._inputs if forward else self._gradients
        messages = arriving.pop((it.stage, it.micro_batch), [])
        self._pipeline.stage = it.stage
        with phase("forward" if forward else "backward"):
            self._beacon.at(part, *at, name.encode())
            received = self._arrived(it, messages)
            if forward:
                self._forward(it, feed, received)
            elif it.kind != WEIGHTS:
                self._backward(it, received)
            if self._later is not None and it.kind in (B, WEIGHTS):
                self._add_to_weights((it.stage, it.micro_batch))

    def _arrived(self, it: Instruction, messages: Arriving) -> tuple[Tensor, ...]:
        """Return the tensors that an instruction needs. A rank that waits reports the instruction and the sender."""
        if any(work is not None for _, work in messages):
            near = ranks_of_stages(self._config.parallel)[it.stage + (-1 if it.kind == F else 1)]
            elements = sum(tensor.numel() for tensor, _ in messages)
            with self._beacon.message(b"recv", elements, self._axis.ranks[near], str(it)):
                for _, work in messages:
                    work.wait()
        return tuple(tensor for tensor, _ in messages)

    def _forward(self, it: Instruction, feed: Feed, inputs: tuple[Tensor, ...]) -> None:
        training = torch.is_grad_enabled()
        for tensor in inputs:
            tensor.requires_grad_(training and tensor.is_floating_point())
        if it.stage == 0:
            inputs = next(feed)[0]
        elif it.stage == self._stages - 1:
            next(feed)  # hands its labels to the head
        outputs = DeepSpeedEngine.forward(self._engine, inputs)
        if training:
            self._kept[it.stage, it.micro_batch] = inputs, outputs
        if it.stage < self._stages - 1:
            self._made[it] = tuple(each.detach() for each in outputs)

    def _backward(self, it: Instruction, gradients: tuple[Tensor, ...]) -> None:
        inputs, outputs = self._kept.pop((it.stage, it.micro_batch))
        if it.stage == self._stages - 1:
            DeepSpeedEngine.backward(self._engine, outputs)
        elif outputs[0].requires_grad:  # else the first stage, where a run trains nothing
            self._accumulating(lambda: outputs[0].backward(*gradients))
        if self._later is not None:
            self._waiting[it.stage, it.micro_batch] = self._later.take()
        if it.stage:
            assert inputs[0].grad is not None
            self._made[it.result] = (inputs[0].grad,)

    def _add_to_weights(self, place: Place) -> None:
        self._accumulating(lambda: accumulate(self._waiting.pop(place)))

    def _accumulating(self, backward: Callable[[], None]) -> None:
        """Run a backward pass as `PipelineEngine._exec_backward_pass` does on a stage without the loss."""
        engine, narrow = self._engine, self._engine.using_bf16_optimizer
        if narrow:
            engine.optimizer.clear_lp_grads()
        engine._running_engine_backward = True
        try:
            backward()
        finally:
            engine._running_engine_backward = False
        if narrow and not engine._config.bfloat16_config.immediate_grad_update:
            engine.optimizer.update_hp_grads(clear_lp_grads=False)

    def _keep(self, message: Message) -> None:
        """Two stages of this rank follow each other."""
        place, forward = _next_place(message), message.made.kind == F
        kept = [(tensor, None) for tensor in self._made.pop(message.made)]
        (self._inputs if forward else self._gradients)[place] = kept

    def _send(self, message: Message) -> None:
        with phase("forward" if message.made.kind == F else "backward"):
            for tensor in self._made.pop(message.made):
                whole = tensor.contiguous()
                work = dist.isend(whole, group=self._axis.group, group_dst=message.to)
                self._sent.append((whole, work, message))

    def _receive(self, message: Message, sizes: tuple[int, int]) -> None:
        place, forward = _next_place(message), message.made.kind == F
        if forward:
            buffers = stream_buffers(self._pipeline.plan, self._pipeline.parts[place[0]], *sizes)
        else:
            buffers = [torch.empty_like(self._kept[place][1][0], memory_format=torch.contiguous_format)]
        with phase("forward" if forward else "backward"):
            works = [dist.irecv(each, group=self._axis.group, group_src=message.source) for each in buffers]
        (self._inputs if forward else self._gradients)[place] = list(zip(buffers, works, strict=True))


def _next_place(message: Message) -> Place:
    made = message.made
    return made.stage + (1 if made.kind == F else -1), made.micro_batch

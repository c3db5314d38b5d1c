"""Accounts of every step's communication: in the metrics, in a file per rank, and as a table at the end."""

import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model.block import Block
from megatron.model.costs.exchanges import MEAN, MOST
from megatron.model.costs.traffic import NotPredicted
from megatron.model.embedding_and_head import Embedding, Head
from megatron.model.kernels.compile import choose_compilation
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.layout import AXES
from megatron.parallel.messages.account import Recorder, phase
from megatron.parallel.messages.traffic import Duration, Durations, MessageKind, Tally, members_text
from megatron.parallel.transport.routes import installed_routes
from megatron.plan.candidate import on_device
from megatron.plan.messages.predict import predict
from megatron.report.communication import FOLDER, AccountFile, by_group, step_table
from megatron.report.message_trace import write_events

from ...parallel.messages.timing import DeviceClock, HostClock, Message, Offset, Timed, Timer, find_last, measure_offset
from ..algorithms import hosts_of
from ..exchange import StepReport, report_traffic
from ..hook import Hook, HookContext
from ..trainer import Trainer

KEPT = 4  # steps whose single messages are kept for a trace
LIMIT = 100_000  # messages that are kept
AGAIN = 100  # timed steps between two comparisons of clocks


@dataclass(frozen=True)
class StepMessages:
    """A step's messages, in nanoseconds of rank 0's clock."""

    step: int
    messages: list[Timed]
    spans: list[tuple[str, int, int]]  # (phase, begin, end)

    def durations(self) -> Durations:
        found = Durations()
        for each in self.messages:
            if each.end is not None:
                call, waiting = each.message.call, each.waiting
                kind = MessageKind(call.phase, call.group, members_text(each.message.ranks), call.operation, call.dtype)
                last = each.latest is not None and each.latest <= each.start
                found.add(
                    kind,
                    Duration(
                        1,
                        each.message.size,
                        (each.end - each.start) / 1e9,
                        each.exposed / 1e9,
                        (waiting or 0) / 1e9,
                        int(waiting is not None),
                        int(last),
                    ),
                )
        return found

    def record(self, offset: Offset) -> dict[str, Any]:
        """Record of a file: each message as [phase, layer, group, members, operation, dtype, bytes, start, end,
        latest, stalls]."""
        rows = []
        for each in self.messages:
            call, members = each.message.call, members_text(each.message.ranks)
            rows.append(
                [call.phase, call.layer, call.group, members, call.operation, call.dtype, each.message.size,
                 each.start, each.end, each.latest, each.stalls]
            )  # fmt: skip
        return {"step": self.step, "clock_error": offset.error, "spans": self.spans, "messages": rows}


class MessageTimes:
    """Times the recorder's messages between the beginning and the end of timed steps."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        assert recorder.timer is not None
        self.timer: Timer = recorder.timer
        self._device, self._offset, self._steps = device, Offset(), 0
        self._unread: deque[tuple[int, Offset, list[Message], list[tuple]]] = deque()
        self.kept: deque[tuple[StepMessages, Offset]] = deque()

    def begin(self) -> None:
        """Time the next step. All ranks call it."""
        if self._steps % AGAIN == 0:
            with phase("times"):
                self._offset = measure_offset(self.timer.clock.now, self._device)
        self._steps += 1
        self.timer.clock.begin()
        self.timer.active = True

    def end(self, step: int) -> None:
        """The step's calls are made."""
        self.timer.active = False
        self._unread.append((step, self._offset, *self.timer.take()))

    def read(self, step: int) -> tuple[int, Durations] | None:
        """The last timed step up to `step`, and its sums. None without one. The device must have done that step. All
        ranks call it."""
        found = None
        while self._unread and self._unread[0][0] <= step:
            at, offset, messages, spans = self._unread.popleft()
            clock, back = self.timer.clock, offset.nanoseconds
            clock.finish()
            timed = [Timed(each, clock, back) for each in messages]
            if dist.is_initialized() and dist.get_world_size() > 1:
                with phase("times"):
                    find_last(timed, self._device)
            read = [(name, clock.read(a) - back, clock.read(b) - back) for name, a, b in spans]
            found = StepMessages(at, timed, read)
            for each in messages:
                each.group = None  # no longer needed

            self._keep(found, offset)
        return None if found is None else (found.step, found.durations())

    def _keep(self, found: StepMessages, offset: Offset) -> None:
        self.kept.append((found, offset))
        while len(self.kept) > 1 and (len(self.kept) > KEPT or sum(len(one.messages) for one, _ in self.kept) > LIMIT):
            self.kept.popleft()


def label_layers(recorder: Recorder, module: nn.Module, *, inside: bool = True) -> None:
    """Have the recorder name the layers of a model (or a stage): `embedding`, `layers.3`, `layers.3.mlp`, `head`.

    Args:
        inside: name the parts of blocks too. False for compiled blocks, where hooks would be traced.
    """
    for each in module.modules():
        if isinstance(each, Embedding):
            recorder.label(each, "embedding")
        elif isinstance(each, Head):
            recorder.label(each, "head")
        elif isinstance(each, Block) and inside:
            place = ".".join(logical_of(next(each.parameters())).name.split(".")[:2])
            recorder.label(each, place)
            if each.injection is not None:
                recorder.label(each.injection, f"{place}.injection")
            if each.inputs is not None:
                recorder.label(each.inputs, f"{place}.inputs")
            for part in each.side_layers or ():  # a recomputation calls the parts, not the block
                recorder.label(part, place)
            for kind, layer in each.layers():
                recorder.label(layer, f"{place}.{kind.name}")


Expected = Callable[[int, Tensor | None, int], Tally]  # step, its documents, shared numbers of ranks


class CommunicationHook(Hook):
    """Counts between the beginning and the end of each step. Messages between steps are counted separately.

    Args:
        timed: time messages of the logged steps, too.
        hosts: of all ranks. Called once, by all ranks together.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int,
        *,
        inside: bool = True,
        timed: bool = False,
        hosts: Callable[[], Sequence[Hashable]] = tuple,
    ) -> None:
        self._folder, self._every, self._inside, self._timed = Path(folder), every, inside, timed
        self._hosts = hosts
        self._recorder: Recorder | None = None
        self._file: AccountFile | None = None
        self._outside, self._last = Tally(), Tally()
        self._times: MessageTimes | None = None
        self._durations: Durations | None = None  # of the last timed step that was read
        self._heard = -1
        self._predicted: Expected | None = None
        self._varies, self._shared = False, 0  # numbers that ranks shared in the last step whose prediction is written

    @classmethod
    def of(cls, parts: HookContext) -> "CommunicationHook | None":
        config = parts.config
        if config.logging.communication == "off":
            return None
        extent, _ = choose_compilation(config, parts.world.device if parts.world else "cpu")
        timed = config.logging.communication == "times"
        world = parts.world
        return cls(
            config.run.dir,
            config.logging.every,
            inside=extent != "blocks",
            timed=timed,
            hosts=partial(hosts_of, config, world) if world else tuple,
        )

    def on_start(self, trainer: Trainer) -> None:
        mesh = trainer.mesh
        device = trainer.exchange.device
        clock = None
        if self._timed:
            clock = HostClock() if device.type == "cpu" else DeviceClock(torch.get_device_module(device))
        self._recorder = Recorder(mesh, clock)
        label_layers(self._recorder, trainer.engine.module, inside=self._inside)
        place = {axis: getattr(mesh.at, axis) for axis in AXES if axis != "context" or mesh.context.size > 1}
        expected, self._varies, self._predicted = _expected(trainer)
        facts = {"host": gethostname(), "layout": mesh.layout.sizes, "at": place, **expected}
        self._file = AccountFile(self._folder, mesh.rank, facts)
        self._recorder.install()
        hosts = self._hosts()
        self._recorder.hosts = hosts if len(set(hosts)) > 1 else ()
        if self._timed:
            self._times = MessageTimes(self._recorder, device)

    @property
    def _open(self) -> tuple[Recorder, AccountFile]:
        if self._recorder is None or self._file is None:
            raise RuntimeError("the run has not begun")
        return self._recorder, self._file

    def before_step(self, trainer: Trainer, step: int) -> None:
        logged = step % self._every == 0 or step == trainer.end - 1
        if self._times is not None and logged:
            self._times.begin()
        self._outside += self._open[0].tally.take()
        self._open[0].crossing.take()

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        self._heard = report.step

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        recorder, file = self._open
        self._last, crossing = recorder.tally.take(), recorder.crossing.take()
        if self._times is not None:
            if self._times.timer.active:
                self._times.end(step)
            self._take(self._times.read(self._heard))  # their messages are done on every rank
        if step % self._every == 0 or trainer.last:
            shared = 0 if report.shared is None else report.shared.numel()
            predicted = None
            if self._predicted is not None and (self._varies or shared != self._shared):
                predicted, self._shared = self._predicted(step, trainer.batch.documents, shared), shared
            file.step(step, self._last, self._outside, crossing, predicted)
            self._outside = Tally()
            trainer.extra_metrics["communication"] = by_group(self._last, self._durations, crossing)

    def _take(self, found: tuple[int, Durations] | None) -> None:
        if found is not None:
            self._open[1].times(*found)
            self._durations = found[1]

    def on_end(self, trainer: Trainer) -> None:
        if self._recorder is None:  # the run failed before it began
            return
        if self._times is not None:
            if trainer.error is None:
                self._take(self._times.read(trainer.completed))
            write_events(self._folder, trainer.mesh.rank, [each.record(offset) for each, offset in self._times.kept])
        recorder, file = self._open
        recorder.remove()
        file.close(trainer.completed, self._outside + recorder.tally.take())
        if len(self._last):
            table = step_table(self._last, self._durations)
            trainer.log(f"communication of rank {trainer.mesh.rank} in the last step:\n{table}")
            trainer.log(f"accounts of all ranks: {self._folder / FOLDER}{os.sep}")


def _expected(trainer: Trainer) -> tuple[dict[str, Any], bool, Expected | None]:
    """Predicted messages of this rank's steps, as rows of an account, or the reason why there is no prediction. Also
    whether they vary with the step or its documents, and a function that predicts a step's messages."""
    layout, rank = trainer.mesh.layout, trainer.mesh.rank
    plan = getattr(trainer.loader, "plan", None)
    weighted, routes = bool(plan and plan.masked), installed_routes()
    try:
        config = on_device(trainer.config, trainer.exchange.device.type == "cuda")
        found = predict(config, layout.world_size, rank, weighted=weighted, routes=routes)
    except NotPredicted as error:
        return {"unpredicted": str(error)}, False, None

    def report(shared: int = 0) -> Tally:
        return found.routed.tally(report_traffic(trainer.config, layout, rank, shared))

    facts = {"predicted": (found.step + report()).rows()}
    for name, how in (("uneven", MEAN), ("most", MOST)):
        if calls := found.calls(how):
            facts[name] = Tally((call, 0, 0) for call in calls).rows()
    return facts, found.varies, lambda step, documents, shared: found.at(step, documents) + report(shared)

"""AxoNN's order of passes in a pipeline (Singh and Bhatele, arXiv:2110.13005): a rank works on what has arrived.

A gradient that has arrived is passed on first, since other ranks wait for it, and its activations are freed. Otherwise
the next forward pass begins, if its input is there and no more micro-batches are kept than by 1F1B. The passes of a
stage are in the order of the micro-batches all the same: sums of gradients do not depend on the order of arrival."""

from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from megatron.config.arithmetic.pipelines import BACKWARD, FORWARD, Instruction, Message, Round

from .pipeline_schedule import Look
from .table import Arriving, Feed, TableExecutor

Item = tuple[str, int, Arriving]  # kind of a pass, its micro-batch, and what it needs


class MessageDriven(TableExecutor):
    """Executes the passes of one stage per rank. Evaluations follow a table."""

    def _run(self, made: list[Round], feed: Feed, sizes: tuple[int, int], look: Look | None) -> None:
        if not torch.is_grad_enabled():
            super()._run(made, feed, sizes, look)
            return
        self._forget()
        count = sum((it := each.instructions[self._axis.rank]) is not None and it.kind == FORWARD for each in made)
        boxes = {FORWARD: _Box(), BACKWARD: _Box()}
        try:
            self._passes(count, feed, sizes, boxes)
        finally:
            for box in boxes.values():
                box.posted.put(None)
        self._wait_for_sent(self._sent)
        self._forget()

    def _passes(self, count: int, feed: Feed, sizes: tuple[int, int], boxes: "dict[str, _Box]") -> None:
        rank, last, most = self._axis.rank, self._stages - 1, self._axis.size - self._axis.rank
        arrived = SimpleQueue[Item | BaseException]()
        for box in boxes.values():
            box.start(arrived)
        done, posted = {FORWARD: 0, BACKWARD: 0}, 0
        while done[BACKWARD] < count:
            while rank and posted < min(count, done[FORWARD] + most + 1):  # what the rank before may have sent
                self._post(boxes[FORWARD], Message(Instruction(rank - 1, FORWARD, posted), rank - 1, rank), sizes)
                posted += 1
            kept = done[FORWARD] - done[BACKWARD]
            ready = {
                BACKWARD: kept and (rank == last or (rank, done[BACKWARD]) in self._gradients),
                FORWARD: done[FORWARD] < count and kept < most and (not rank or (rank, done[FORWARD]) in self._inputs),
            }
            if not arrived.empty():
                self._take(arrived.get())
                continue
            if not any(ready.values()):
                # after a gradient if no more is kept, or no pass is left: otherwise the rank before is late
                late = BACKWARD if kept and (kept == most or done[FORWARD] == count) else FORWARD
                name = str(Instruction(rank, late, done[late]))
                peer = self._axis.ranks[rank + (1 if late == BACKWARD else -1)]
                with self._beacon.message(b"recv", 0, peer, name):
                    self._take(arrived.get())
                continue
            kind = BACKWARD if ready[BACKWARD] else FORWARD
            it = Instruction(rank, kind, done[kind])
            self._execute(it, feed, (sum(done.values()) + 1, 2 * count))
            done[kind] += 1
            if it in self._made:
                self._send(Message(it, rank, rank + (1 if kind == FORWARD else -1)))
            if kind == FORWARD and rank < last:
                gradient = Message(it._replace(stage=rank + 1, kind=BACKWARD), rank + 1, rank)
                self._post(boxes[BACKWARD], gradient, sizes)
            self._release_sent()

    def _post(self, box: "_Box", message: Message, sizes: tuple[int, int]) -> None:
        self._receive(message, sizes)
        kind, micro_batch = message.made.kind, message.made.micro_batch
        place = self._inputs if kind == FORWARD else self._gradients
        box.posted.put((kind, micro_batch, place.pop((self._axis.rank, micro_batch))))

    def _take(self, item: Item | BaseException) -> None:
        if isinstance(item, BaseException):
            raise item
        kind, micro_batch, messages = item
        held: dict[Any, Arriving] = self._inputs if kind == FORWARD else self._gradients
        held[self._axis.rank, micro_batch] = [(tensor, None) for tensor, _ in messages]


class _Box:
    """Receives from one neighbour. A thread waits for them: gloo reports an arrival only to a thread that waits."""

    def __init__(self) -> None:
        self.posted = SimpleQueue[Item | None]()

    def start(self, arrived: SimpleQueue[Item | BaseException]) -> None:
        Thread(target=self._wait, args=(arrived,), daemon=True).start()

    def _wait(self, arrived: SimpleQueue[Item | BaseException]) -> None:
        while (item := self.posted.get()) is not None:
            try:
                for _, work in item[2]:
                    work.wait()
            except Exception as error:  # the rank raises it
                arrived.put(error)
                return
            arrived.put(item)

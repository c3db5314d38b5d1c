"""Peers without DeepSpeed, in threads: a few float64 tensors, closed inner steps, and the hooks of real runs."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.checkpoint import SOLO
from megatron.checkpoint.format.fragment import MASTER, Fragment
from megatron.features.peers import hook as hooks
from megatron.features.peers.decoupled import DecoupledHook
from megatron.features.peers.hook import PeersHook
from megatron.features.peers.options import DECOUPLED, PeersSection
from megatron.features.peers.part import OuterState
from megatron.parallel.layout.shard import LogicalTensor, Role

TOKENS = 10  # of a step
Inner = Callable[[dict[str, Tensor], int], None]  # (weights, step): an inner step, in place


class Killed(RuntimeError):
    """A peer stops as by a power cut."""


class SmallPeer:
    """A peer. It is also its own trainer.

    Args:
        weights: at the start, by name.
        inner: its inner step.
        pace: seconds of a step.
    """

    def __init__(
        self, keys: Mapping[str, Any], weights: Mapping[str, Tensor], steps: int, inner: Inner, pace: float = 0.0
    ) -> None:
        self.own = PeersSection(**keys)
        self.weights = {name: each.clone() for name, each in weights.items()}
        model = SimpleNamespace(extensions=[])
        run = SimpleNamespace(dir=f"{self.own.folder}/../{self.own.name}")
        self.config = SimpleNamespace(peers=self.own, training=SimpleNamespace(steps=steps), model=model, run=run)
        self.steps, self.inner, self.pace = steps, inner, pace
        self.completed, self.stop_reason, self.back = 0, None, None
        self.moved = self.open = False
        self.error: BaseException | None = None
        self.requests: set[str] = set()
        self.loader, self.beacon = SimpleNamespace(plan=None), SimpleNamespace(at=lambda *_, **__: None)
        self.logs: list[str] = []
        self.history = [self.copied()]
        self.part = OuterState()
        logical = {name: LogicalTensor(name, tuple(each.shape), Role.HIDDEN) for name, each in weights.items()}

        def masters() -> list[Fragment]:
            return [Fragment(logical[name], MASTER, 0, 1, 0, each.view(-1)) for name, each in self.weights.items()]

        def owned() -> list[Any]:
            return [SimpleNamespace(tensor=logical[name], flat=each.view(-1)) for name, each in self.weights.items()]

        state = SimpleNamespace(
            owned=owned, buffers=[], others=[], fragments=masters, masters=masters, refresh=lambda: None
        )
        mesh: Any = SimpleNamespace(rank=0, layout=SimpleNamespace(world_size=1))
        engine: Any = SimpleNamespace(
            config=self.config,
            mesh=mesh,
            device=torch.device("cpu"),
            communicator=SOLO,
            state=state,
            start_at=lambda step: None,
        )
        self.part.attach(engine)

    def copied(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.weights.items()}

    def saved(self) -> dict[str, Any]:
        """Contents of a checkpoint."""
        part = self.part
        return copy.deepcopy({
            "weights": self.weights,
            "part": part.state(),
            "states": part.states,
            "completed": self.completed,
        })

    def resume(self, saved: Mapping[str, Any]) -> None:
        for name, each in saved["weights"].items():
            self.weights[name].copy_(each)
        self.part.restore(saved["part"])
        for kind, tensors in saved["states"].items():
            for name, each in tensors.items():
                self.part.states[kind][name].copy_(each)
        self.completed = saved["completed"]

    def run(self, border: Callable[[SmallPeer], None] = lambda peer: None) -> None:
        """Train to the end.

        Args:
            border: called between steps.
        """
        world: Any = SimpleNamespace(communicator=SOLO, is_main=True)
        kind = DecoupledHook if self.own.algorithm == DECOUPLED else PeersHook
        trainer: Any = self
        hook = kind(trainer.config, self.part, world)
        identity = {"seed": 1}
        try:
            with (
                mock.patch.object(hooks, "samples_of", lambda plan: ""),
                mock.patch.object(hooks, "identity_of", lambda config, samples: identity),
            ):
                hook.on_start(trainer)
            border(self)
            while self.completed < self.steps and self.stop_reason is None:
                time.sleep(self.pace)
                step = self.completed
                self.inner(self.weights, step)
                self.completed = step + 1
                hook.after_step(trainer, step, None)  # type: ignore[arg-type]
                self.history.append(self.copied())
                border(self)
        finally:
            hook.on_end(trainer)

    # what the hooks use of a trainer

    @property
    def finished(self) -> bool:
        return self.completed >= self.steps and not self.open

    def tokens(self, updates: int) -> int:
        return TOKENS * updates

    def log(self, text: str) -> None:
        self.logs.append(text)

    def record(self, event: str, **facts: Any) -> None:
        self.logs.append(f"{event} {facts}")

    def aside(self, *_: Any) -> Any:
        return nullcontext()

    def stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason  # type: ignore[assignment]

    def ask(self, *_: Any) -> None: ...

    def settle(self) -> None: ...

    def request(self, *_: Any) -> None: ...


def together(runs: Sequence[Callable[[], None]]) -> None:
    """Run peers in threads. Raises their first error."""
    errors: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
        assert not each.is_alive(), "a peer waits for ever"
    if errors:
        raise errors[0]

"""Where metrics go. A sink takes records (see `jsonl`) and is closed at the end; only rank 0 has sinks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .console import Console
from .jsonl import MetricsFile


class Sink(Protocol):
    """Takes one record per logged step or evaluation."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Several sinks as one, with the console among them for messages."""

    def __init__(self, sinks: list[Sink], console: Console) -> None:
        self.sinks = [*sinks, console]
        self.console = console
        self._failing: list[Sink] = []

    def write(self, record: Mapping[str, Any]) -> None:
        """Give a record to every sink; one that cannot write, because its disk is full, does not end the run."""
        for sink in self.sinks:
            try:
                sink.write(record)
            except OSError as error:
                if sink not in self._failing:
                    self._failing.append(sink)
                    self.say(f"warning: {type(sink).__name__} cannot write ({error}); the run goes on without it")
            else:
                if sink in self._failing:
                    self._failing.remove(sink)

    def say(self, text: str) -> None:
        """A message for the person who watches."""
        self.console.say(text)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def open_sinks(config, *, start: int = 0, rank: int = 0, settings: Mapping[str, Any] | None = None) -> Sinks:
    """The sinks that `config.logging` asks for, in `config.run.dir`; on ranks above 0 none, and a silent console.

    Call `jsonl.supersede` first where a run goes on from a checkpoint.

    Args:
        start: completed updates; TensorBoard hides what it has from there on.
        settings: the resolved configuration as plain values, for Weights & Biases.

    Raises:
        ModuleNotFoundError: TensorBoard or Weights & Biases is asked for and not installed.
    """
    if rank:
        return Sinks([], Console("quiet", total=config.training.steps))
    folder, logging = Path(config.run.dir), config.logging
    sinks: list[Sink] = [MetricsFile(folder / "metrics.jsonl")]
    if logging.tensorboard:
        from .tensorboard import TensorBoard

        sinks.append(TensorBoard(folder / "tensorboard", start))
    if logging.wandb.mode != "disabled":
        from .weights_and_biases import WeightsAndBiases

        run = config.run
        sinks.append(
            WeightsAndBiases(logging.wandb, folder, name=run.name, notes=run.notes, settings=settings, start=start)
        )
    return Sinks(sinks, Console(logging.console, total=config.training.steps))

"""Where metrics go: the sinks that a run asks for, and the console. Only rank 0 has sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import Config
from megatron.config.names.added import build_added
from megatron.config.registry import INSIDE, METRIC, load

from .console import MetricsConsole
from .sink import Sink, SinkParts


class Sinks:
    """Several sinks as one, with the console among them for messages."""

    def __init__(self, sinks: list[Sink], console: MetricsConsole) -> None:
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
                    self.log(f"warning: {type(sink).__name__} cannot write ({error}); the run goes on without it")
            else:
                if sink in self._failing:
                    self._failing.remove(sink)

    def log(self, text: str) -> None:
        """A message for the person who watches."""
        self.console.log(text)

    def progress(self, done: int) -> None:
        """The run has completed `done` steps, logged or not."""
        self.console.progress(done)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def open_sinks(config: Config, *, start: int = 0, rank: int = 0, settings: Mapping[str, Any] | None = None) -> Sinks:
    """The sinks that `config.logging` asks for, in `config.run.dir`; on ranks above 0 none, and a silent console.

    Call `jsonl.supersede` first where a run goes on from a checkpoint.

    Args:
        start: completed updates; TensorBoard hides what it has from there on.
        settings: the resolved configuration as plain values, for Weights & Biases.

    Raises:
        UserError: a sink of the user's cannot be made.
        ModuleNotFoundError: TensorBoard or Weights & Biases is asked for and not installed.
    """
    if rank:
        return Sinks([], MetricsConsole("quiet", total=config.training.steps))
    parts = SinkParts(config, start, settings)
    found = [load(path).of(parts) for path in INSIDE[METRIC].values()]
    added = build_added(config, "logging.sinks", METRIC, config.logging.sinks, parts.folder, kind=Sink)
    sinks = [sink for sink in (*found, *added) if sink is not None]
    return Sinks(sinks, MetricsConsole(config.logging.console, total=config.training.steps))

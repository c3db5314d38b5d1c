"""A run's directory, opened for writing: sinks, console and ledger. Only rank 0 has sinks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.parts import build_added
from megatron.config.registry import INSIDE, METRIC, load

from .console import MetricsConsole
from .jsonl import put_aside, sound_metrics, sound_sample, supersede
from .ledger import Ledger
from .sink import Sink, SinkParts


class Sinks:
    """Several sinks as one, and the console for messages."""

    def __init__(self, sinks: list[Sink], console: MetricsConsole) -> None:
        self.sinks = [*sinks, console]
        self.console = console
        self._failing: list[Sink] = []

    def write(self, record: Mapping[str, Any]) -> None:
        """Give a record to every sink. A sink that cannot write, because its disk is full, does not end the run."""
        for sink in self.sinks:
            try:
                sink.write(record)
            except OSError as error:
                if sink not in self._failing:
                    self._failing.append(sink)
                    self.log(f"warning: {type(sink).__name__} cannot write ({error}): continuing without it")
            else:
                if sink in self._failing:
                    self._failing.remove(sink)

    def log(self, text: str) -> None:
        self.console.log(text)

    def progress(self, done: int) -> None:
        """The run has completed `done` steps, logged or not."""
        self.console.progress(done)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def open_sinks(config: Config, *, start: int = 0, rank: int = 0, settings: Mapping[str, Any] | None = None) -> Sinks:
    """The sinks of `config.logging`, in `config.run.dir`. None on ranks above 0, and a silent console.

    Call `jsonl.supersede` first if a run continues from a checkpoint.

    Args:
        start: completed updates. TensorBoard hides its data from there on.
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


def put_damage_aside(folder: Path) -> None:
    """Move damaged lines of a run's files to <name>.damaged.jsonl, each with a warning."""
    if (ledger := folder / "ledger.jsonl").exists():
        Ledger(ledger).close()
    put_aside(folder / "metrics.jsonl", sound_metrics)
    put_aside(folder / "samples.jsonl", sound_sample)


def open_run(
    config: Config, *, rank: int, start: int, settings: Mapping[str, Any] | None = None
) -> tuple[Sinks, Ledger | None]:
    """The sinks and the ledger of a run that continues from `start` completed updates.

    Lines of metrics.jsonl that will be written again are moved aside, with an entry in the ledger. Ranks above 0 get
    silent sinks and no ledger."""
    if rank:
        return open_sinks(config, rank=rank), None
    folder = Path(config.run.dir)
    ledger = Ledger(folder / "ledger.jsonl")
    lines = supersede(folder / "metrics.jsonl", start)
    if lines:
        ledger.write("superseded", step=start, lines=lines, moved_to="metrics.superseded.jsonl")
    return open_sinks(config, start=start, settings=settings), ledger

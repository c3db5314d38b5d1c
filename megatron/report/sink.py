"""The contract of metrics sinks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron.config import Config


@dataclass(frozen=True)
class SinkParts:
    """Parts of sinks: the run's configuration, completed updates, and the configuration as plain values."""

    config: Config
    start: int = 0
    settings: Mapping[str, Any] | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


@runtime_checkable
class Sink(Protocol):
    """Takes one record per logged step or evaluation, on rank 0.

    A sink of a user's package is listed in `logging.sinks`, and made with the run's directory and its `options`. One
    inside is a line of the registry, and made by its classmethod `of(parts) -> Sink | None`."""

    def write(self, record: Mapping[str, Any]) -> None:
        """A record of `metrics.jsonl`: names of numbers, text, lists or mappings."""

    def close(self) -> None:
        """The run is over."""

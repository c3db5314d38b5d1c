"""The TensorBoard sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .jsonl import evaluations_at
from .sink import SinkParts
from .tags import tagged


class TensorBoard:
    """Writes the numbers of each record as scalars, named by `tags`.

    Args:
        start: completed updates. Earlier runs' points from there on are hidden.
        again: records at `start` that stay. They are written again since TensorBoard hides them too.
    """

    def __init__(self, folder: str | Path, start: int = 0, again: Sequence[Mapping[str, Any]] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=start or None)
        for record in again:
            self.write(record)

    @classmethod
    def of(cls, parts: SinkParts) -> TensorBoard | None:
        if not parts.config.logging.tensorboard:
            return None
        return cls(parts.folder / "tensorboard", parts.start, evaluations_at(parts))

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in tagged(record).items():
            self._writer.add_scalar(name, value, global_step=record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

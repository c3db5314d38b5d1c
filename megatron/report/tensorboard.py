"""The TensorBoard sink, and names of numbers that TensorBoard and W&B group by the part before the first `/`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .jsonl import evaluations_at, flatten
from .sink import SinkParts

_GROUPS = {
    "loss": "loss/train",
    "lr": "optimizer/lr",
    "grad_norm": "optimizer/grad_norm",
    "tokens_per_second": "speed/tokens_per_second",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "peak_tflops": "speed/peak_tflops",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "eta_seconds": "speed/eta_seconds",
    "memory_bytes": "memory/bytes",
}


def tagged(record: Mapping[str, Any]) -> dict[str, float]:
    """`loss/train` next to `loss/<validation set>`, `experts/layer_3/load/7`, and the rest below `train`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if key == "validation":
            for name, numbers in value.items():
                found.update({f"{what}/{name}": number for what, number in flatten(numbers).items()})
        elif key == "moe":
            for layer, numbers in value.items():
                found.update(_lists(numbers, f"experts/layer_{layer}/"))
        elif key == "statistics":
            found.update({f"{what}/{layer}": number for layer, each in value.items() for what, number in each.items()})
        elif key == "communication":
            found.update(flatten(value, "communication/"))
        elif key != "step":
            found.update({_GROUPS.get(name, f"train/{name}"): number for name, number in flatten({key: value}).items()})
    return found


def _lists(numbers: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Numbers, and each member of lists of them by its place."""
    spread = {
        name: dict(zip(map(str, range(len(value))), value)) if isinstance(value, (list, tuple)) else value
        for name, value in numbers.items()
    }
    return flatten(spread, prefix)


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
    def of(cls, parts: SinkParts) -> "TensorBoard | None":
        if not parts.config.logging.tensorboard:
            return None
        return cls(parts.folder / "tensorboard", parts.start, evaluations_at(parts))

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in tagged(record).items():
            self._writer.add_scalar(name, value, global_step=record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

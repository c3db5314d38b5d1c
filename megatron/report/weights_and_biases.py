"""The Weights & Biases sink."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .jsonl import flatten


class WeightsAndBiases:
    """Logs each record to one W&B run, which a resumed run continues (its id is kept in the run's directory).

    Args:
        options: `logging.wandb`; mode offline writes below `folder`/wandb and sends nothing.
        folder: the run's directory.
        name, notes: shown by W&B.
        settings: the resolved configuration as plain values.

    Raises:
        ModuleNotFoundError: the wandb package is not installed.
    """

    def __init__(
        self,
        options,
        folder: Path,
        *,
        name: str | None = None,
        notes: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"logging.wandb.mode: {options.mode} needs the wandb package: pip install wandb, or set it to disabled"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            tags=options.tags or None,
            mode=options.mode,
            dir=str(folder),
            name=name,
            notes=notes or None,
            id=_run_id(folder),
            resume="allow" if options.mode == "online" else None,
            config=dict(settings or {}),
            settings=wandb.Settings(console="off"),
        )

    def write(self, record: Mapping[str, Any]) -> None:
        numbers = flatten(record)
        self._run.log({name: value for name, value in numbers.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # waits for W&B's own process, which writes offline files after finish() has returned


def _run_id(folder: Path) -> str:
    path = folder / "wandb.json"
    if not path.exists():
        path.write_text(json.dumps({"id": secrets.token_hex(4)}) + "\n")
    return json.loads(path.read_text())["id"]

"""The Weights & Biases sink."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron.config.file_access import replace_file
from megatron.config.sections.output import WandbOptions

from .append import warn
from .jsonl import evaluations_at
from .sink import SinkParts
from .tensorboard import tagged

if TYPE_CHECKING:
    import wandb


class WeightsAndBiases:
    """Logs each record to one W&B run, which a resumed run continues (its id is kept in the run's directory).

    W&B drops records for steps that it has. So a run that goes back behind them rewinds its W&B run if the server can,
    and else becomes a new run in the same group.

    Args:
        options: `logging.wandb`. Mode offline writes below `folder`/wandb and sends nothing.
        settings: the resolved configuration as plain values.
        start: completed updates, from which records come.
        again: records at `start` that stay. They are logged again if W&B goes back behind them.

    Raises:
        ModuleNotFoundError: the wandb package is not installed.
    """

    def __init__(
        self,
        options: WandbOptions,
        folder: Path,
        *,
        name: str | None = None,
        notes: str = "",
        settings: Mapping[str, Any] | None = None,
        start: int = 0,
        again: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"logging.wandb.mode: {options.mode} needs the wandb package: pip install wandb, or set it to disabled"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._teardown = wandb.teardown
        self._path = folder / "wandb.json"
        self._known = _known(self._path)
        last = self._known.get("last_step", -1)
        # An evaluation at `start` stays. Online the next record of its step would be dropped.
        stays = options.mode == "offline" and 0 < start == last > self._known.get("last_training_step", last)
        back = last >= start and not stays
        common = {
            "project": options.project,
            "entity": options.entity,
            "group": options.group or name,
            "tags": options.tags or None,
            "mode": options.mode,
            "dir": str(folder),
            "name": name,
            "notes": notes or None,
            "config": dict(settings or {}),
            "settings": wandb.Settings(console="off", silent=True),  # its closing table would cover our summary
        }
        self._run = self._open(wandb, common, start, back)
        self._known |= {"id": self._run.id, "last_step": start - 1 if back else last}
        self._tokens = 0.0
        self._keep()
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("tokens", hidden=True)  # to be chosen as x in place of the steps
        self._run.define_metric("*", step_metric="step")
        for record in again if back and options.mode == "online" else ():
            self.write(record)

    def _open(self, wandb: ModuleType, common: dict[str, Any], start: int, back: bool) -> wandb.Run:
        if back and common["mode"] == "online" and start:
            try:
                return wandb.init(**common, resume_from=f"{self._known['id']}?_step={start - 1}")
            except wandb.errors.Error:
                pass  # a server that cannot rewind
        if back:
            return wandb.init(**common, id=_new_id())
        return wandb.init(**common, id=self._known["id"], resume="allow" if common["mode"] == "online" else None)

    @classmethod
    def of(cls, parts: SinkParts) -> WeightsAndBiases | None:
        options, run = parts.config.logging.wandb, parts.config.run
        if options.mode == "disabled":
            return None
        own: dict[str, Any] = {"name": run.name, "notes": run.notes, "settings": parts.settings}
        return cls(options, parts.folder, **own, start=parts.start, again=evaluations_at(parts))

    def write(self, record: Mapping[str, Any]) -> None:
        self._tokens = record.get("tokens", self._tokens)
        step = record["step"]
        self._run.log({**tagged(record), "step": step, "tokens": self._tokens}, step=step)
        if step > self._known["last_step"] or "loss" in record:
            self._known |= {"last_step": max(step, self._known["last_step"])}
            self._known |= {"last_training_step": step} if "loss" in record else {}
            self._keep()

    def _keep(self) -> None:
        replace_file(self._path, json.dumps(self._known) + "\n")

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # waits for W&B's own process, which writes offline files after finish() has returned


def _known(path: Path) -> dict[str, Any]:
    """The id of the W&B run and its last step. A new id if the file is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
        steps = (found.get(name, -1) for name in ("last_step", "last_training_step"))
        if isinstance(found["id"], str) and all(isinstance(step, int) for step in steps):
            return found
    except FileNotFoundError:
        return {"id": _new_id()}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    warn(f"{path} is damaged: W&B gets a new run")
    return {"id": _new_id()}


def _new_id() -> str:
    return secrets.token_hex(4)

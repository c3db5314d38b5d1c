"""Return to a checkpoint from before a spike, and skip some of the batches around it (PaLM, arXiv 2204.02311)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.levels import Levels
from megatron.checkpoint.save.store import Store
from megatron.config import Config
from megatron.data.skipped_batches import LeftOut
from megatron.report.ledger import Ledger
from megatron.training.hook import RollBack
from megatron.training.start.resume import StartPoint
from megatron.training.world import World

from .options import spikes_of


class CannotRollBack(RuntimeError):
    """A rollback is impossible. The message has the reason and a fix."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


def roll_back(
    config: Config,
    world: World,
    back: RollBack,
    left_out: LeftOut,
    log: Callable[[str], None],
    levels: Levels | None = None,
) -> StartPoint:
    """Find where the run continues. All ranks call it. Later checkpoints are put aside, then the ledger has an entry.

    In this order a kill between the two loses nothing: the run resumes from the same checkpoint, comes to the same
    spike and goes back again.

    Args:
        left_out: batches that the run has skipped so far.

    Raises:
        CannotRollBack: no checkpoint is old enough, or `spikes.limit` is reached.
    """
    options, done = spikes_of(config), len(left_out.pairs) - len(config.data.left_out)
    if done >= options.limit:
        raise CannotRollBack(
            f"{back.told}, and the run has gone back {done} times already (spikes.limit). Check the data and "
            "optimizer.lr",
            back.step,
        )
    store = Store(config.checkpoint.dir, world.communicator)
    wanted = max(back.step - options.back, 0)
    found = store.resume("auto", before=wanted + 1).checkpoint or store.resume("auto", before=back.step + 1).checkpoint
    if found is None:
        raise CannotRollBack(
            f"{back.told}, and there is no checkpoint from before it to go back to. Save earlier (checkpoint.every, or "
            "checkpoint.steps=[0])",
            back.step,
        )
    for line in [*(levels.drop(found.step) if levels else ()), *store.set_aside(after=found.step)]:
        log(line)
    pair = (max(found.step, wanted), options.leave_out)
    left_out = left_out + LeftOut((pair,))
    facts = {"checkpoint": str(found.path), "left_out": [list(each) for each in left_out.pairs]}
    if world.is_main:
        ledger = Ledger(Path(config.run.dir) / "ledger.jsonl")
        ledger.write("rollback", step=back.step, to=found.step, reason=back.told, **facts)
        ledger.close()
    log(
        f"{back.told}: going back to {found.path}. From step {pair[0]} on {pair[1]} batches are skipped "
        f"(rollback {done + 1} of at most {options.limit})"
    )
    return StartPoint(found, None, {**facts, "ledger": found.meta.ledger}, left_out)

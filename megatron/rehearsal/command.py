"""`deepy train --rehearse --ranks N a.yml ...`: the needs of a run's ranks, without its machines."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from megatron.config import Config, ConfigError, Problem, load
from megatron.config.optimizer_kind import optimizer_kind
from megatron.config.problems import UserError
from megatron.config.source.arguments import split
from megatron.config.variants import used_kinds
from megatron.parallel.layout.layout import Layout
from megatron.plan.candidate import on_device
from megatron.plan.devices import Device, known_devices

if TYPE_CHECKING:
    from .rank import RankCounts

USAGE = (
    "deepy train --rehearse --ranks N [--device NAME] [--machine FILE] [--rank N,...] [--json] "
    "a.yml ... key.path=value ..."
)
# imported once, for the processes of all ranks
PRELOADED = ["megatron.rehearsal.rank", "torch.distributed._tools.fake_collectives", "megatron.engine.preload"]


def main(argv: Sequence[str]) -> int:
    """Run the command. The exit status is 1 if a rehearsed rank does not fit its device, 2 after a user error."""
    options = _parser().parse_args(argv)
    try:
        begun = time.monotonic()
        device = _device(options.device, options.machine)
        taken = split(options.words)
        resolved = load(taken.files, taken.overrides, ranks=options.ranks, check_inputs=False, here=False)
        config = resolved.config
        _refuse(config)
        layout = Layout.of(config, options.ranks)
        ranks = _ranks(options.rank, config, layout)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    from .report import document, step_seconds, text, works

    gpu = (config.launch.device if device is None else device.name) != "cpu"
    config = on_device(config, gpu)
    seen = {rank: in_own_process(config, options.ranks, rank, gpu=gpu) for rank in ranks}
    found = document(config, layout, seen, device, time.monotonic() - begun)
    found["precision_given"] = resolved.origins["precision.compute"].kind != "default"
    if device is not None and device.host is not None:
        found["step_seconds"] = step_seconds(config, options.ranks, works(config, options.ranks, seen), device)
        found["figures"] = f"{options.device} in {options.machine or 'megatron/plan/devices.yml'}"
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if options.json else text(found))
    return int(any(each["memory"]["fits"] is False for each in found["rehearsed"]))


def in_own_process(
    config: Config, ranks: int, rank: int, micro_batches: int | None = None, gpu: bool = False
) -> RankCounts:
    """`rehearse_rank` in a separate process, since DeepSpeed keeps state for the life of a process."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_rehearse, config, ranks, rank, micro_batches, gpu).result()


def _rehearse(config: Config, ranks: int, rank: int, micro_batches: int | None, gpu: bool) -> RankCounts:
    from .rank import rehearse_rank

    gc.freeze()  # DeepSpeed collects garbage while it starts: imported objects are exempt
    return rehearse_rank(config, ranks, rank, micro_batches, gpu=gpu)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="deepy train --rehearse", usage=USAGE, allow_abbrev=False)
    made.add_argument("--ranks", type=int, required=True)
    made.add_argument("--device")
    made.add_argument("--machine")
    made.add_argument("--rank")
    made.add_argument("--json", action="store_true")
    made.add_argument("words", nargs=argparse.REMAINDER)
    return made


def _device(name: str | None, machine: str | None) -> Device | None:
    devices = known_devices(machine)[0]
    if name is not None and name not in devices:
        rule = f"must be one of {', '.join(devices)}"
        raise ConfigError([Problem("--device", rule, "remove it to see bytes without a verdict", name)])
    return None if name is None else devices[name]


def _ranks(given: str | None, config: Config, layout: Layout) -> list[int]:
    from .report import hands_states_on, kinds_of_ranks

    if given is None:
        return kinds_of_ranks(config, layout)
    words = given.split(",")
    wrong = [word for word in words if not (re.fullmatch("[0-9]{1,9}", word) and int(word) < layout.world_size)]
    if wrong:
        rule = f"must be ranks of the run, 0 to {layout.world_size - 1}, separated by commas"
        raise ConfigError([Problem("--rank", rule, "remove it to see one rank of each kind", ", ".join(wrong))])
    ranks = list(dict.fromkeys(map(int, words)))
    later = [rank for rank in ranks if layout.coordinates(rank).context > 0]
    if later and hands_states_on(config):
        rule = "must begin its sequences: the states that the rank before hands on are not known here"
        fix = f"use rank {later[0] - layout.coordinates(later[0]).context * layout.tensor}, which does the same"
        raise ConfigError([Problem("--rank", rule, fix, later[0])])
    return ranks


def _refuse(config: Config) -> None:
    if config.launch.peers is not None:
        rule = "must be null in a rehearsal, which is of the ranks of one run"
        fix = "remove it to rehearse one peer without its exchanges"
        raise ConfigError([Problem("launch.peers", rule, fix, config.launch.peers)])
    if config.model.vocab_size is None:
        rule = "must be known: the tokenizer, which would say it, cannot be read here"
        raise ConfigError([Problem("model.vocab_size", rule, "give the number: model.vocab_size=50304", None)])
    if any(kind.whole for _, kind, _ in used_kinds(config.model)):
        rule = "must be layers of deepy in a rehearsal: a class of another program is not run without values"
        raise ConfigError([Problem("model.layers", rule, "use `deepy plan` for an estimate", config.model.layers)])
    kind = optimizer_kind(config)
    if kind is not None and kind.whole_matrices:
        rule = "must work element by element in a rehearsal: owners of whole matrices are agreed on by messages"
        fix = "rehearse with optimizer.type=adamw. docs/optimizers.md says what else is sent and kept"
        raise ConfigError([Problem("optimizer.type", rule, fix, config.optimizer.type)])
    if config.precision.compute == "fp16":
        rule = "must be bf16 or fp32 in a rehearsal: DeepSpeed refuses fp16 where there is no GPU"
        fix = "rehearse with precision.compute=bf16, which takes the same bytes but for the loss scale"
        raise ConfigError([Problem("precision.compute", rule, fix, config.precision.compute)])

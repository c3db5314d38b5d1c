"""One rank of a run on the stand-in of a GPU: what a step asks of it, as JSON.

    python -m tests.stand_ins.gpu.program OUTPUT RANKS FILE... KEY=VALUE...
    python -m tests.stand_ins.gpu.program LIST.jobs      several of them, as JSON, from one process

Other ranks are pretended: every collective returns at once, and all have said what this one says. Numbers are zero.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from .compiled import use_first_configurations

STEPS, COUNTED = 6, 3  # a step in whose neighbours nothing is compiled, allocated or logged for the first time
TOKEN = 4  # the counted pass of the decoder
LIFE = "life"  # in the name of an output: of a run that evaluates, saves and resumes
OURS = f"{os.sep}megatron{os.sep}"
WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long)


class Counts:
    """Calls of the device since the last `take`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._begin()
        self._keep = WATCHER(self._event)
        library.stand_in_watch(self._keep)

    def _begin(self) -> None:
        self.kernels, self.waits, self.pageable = Counter(), Counter(), Counter()
        self.collectives, self.groups, self.pinned = Counter(), Counter(), Counter()

    def _event(self, kind: bytes, name: bytes, size: int) -> None:
        what = name.decode()
        if kind == b"kernel":
            self.kernels[what] += 1
        elif kind == b"wait":
            self.waits[f"{what} in {place()}"] += 1
        elif kind == b"pageable":
            self.pageable[f"{what} in {place()}"] += 1
        elif kind == b"pinned":
            self.pinned[what] += 1
        elif kind == b"collective":
            self.collectives[f"{what} of {size} bytes"] += 1
        elif kind == b"group":
            self.groups[what] += 1

    def take(self) -> dict:
        found = {name: dict(sorted(each.items())) for name, each in vars(self).items() if isinstance(each, Counter)}
        found["kernels_by_name"], found["kernels"] = found["kernels"], sum(self.kernels.values())
        self._begin()
        return found


def place() -> str:
    """The innermost function outside of torch, and of ours where that is another one."""
    frame: FrameType | None = sys._getframe(2)
    names: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        outside = f"{os.sep}torch{os.sep}" in path or path.startswith("<") or path == __file__ or "contextlib" in path
        if not outside:
            names.append(frame.f_code.co_qualname.replace(".<locals>", ""))
            if OURS in path:
                break
        frame = frame.f_back
    return " of ".join(dict.fromkeys(names[:1] + names[-1:])) or "the backward pass"


def pretend_ranks(ranks: int) -> None:
    """The environment and the answers of a job with this number of ranks. This is the first one."""
    import torch.distributed as dist

    import megatron.engine.base as base
    import megatron.kinds.moe.dispatch as dispatch
    import megatron.training.world as world
    from megatron.checkpoint.format.communicator import GroupCommunicator, StoreCommunicator

    here = min(ranks, 8)
    os.environ.update(RANK="0", WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(here))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", STAND_IN_GPUS=str(here))
    # The host waits for sizes of messages. It reads zeros, so they are then as in a rehearsal.
    dispatch.hasattr = lambda counts, _: len(counts.tolist()) > 0
    base.float = lambda weight: float(weight) or 1.0  # and for the weight of all labels
    world.open_store = lambda *_, **__: dist.HashStore()
    prepare = world.prepare_deepspeed

    def prepared(device):
        prepare(device)
        from deepspeed.runtime.zero import utils

        utils.get_lst_from_rank0 = lambda own: own
        utils.assert_lst_len_same_as_other_ranks = lambda own: None

    world.prepare_deepspeed = prepared
    for each in (GroupCommunicator, StoreCommunicator):
        each.gather = each.collect = lambda self, value, ranks=ranks: [value] * ranks
        each.broadcast = lambda self, value: value
        each.any_rank = lambda self, flags: [bool(flag) for flag in flags]
        each.barrier = lambda self: None


def watch_steps(counts: Counts, output: Path) -> None:
    """Write what was counted until the steps began, and from one step to the next."""
    from megatron.training.trainer import Trainer

    found: dict[str, dict] = {}
    step = Trainer._step

    def counted(self, number, batch):
        if number == 0:
            found["start"] = counts.take()
        if number == COUNTED:
            counts.take()
        if number == COUNTED + 1:
            found["step"] = counts.take()
            output.write_text(json.dumps(found))
            os._exit(0)
        return step(self, number, batch)

    Trainer._step = counted


def watch_life(counts: Counts, output: Path) -> None:
    """Write what the first evaluation, save and resume ask of the device, in addition to what the file has. And what
    the decoder asks for one token of a text, until it begins the next one."""
    import megatron.training.run as training
    from megatron.checkpoint.save.saver import Saver
    from megatron.decoding.decoder import Decoder
    from megatron.engine.engine import PlainEngine

    found = json.loads(output.read_text()) if output.exists() else {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts.take()
            result = function(*arguments, **options)
            if name not in found and (name != "resume" or arguments[0].checkpoint is not None):
                found[name] = counts.take()
                output.write_text(json.dumps(found))
            return result

        return call

    start, passes = Decoder.start, itertools.count(1)

    def started(self: Any) -> Any:
        number, since = next(passes), counts.take()
        if number == TOKEN + 1:
            found["token"] = since
            output.write_text(json.dumps(found))
        return start(self)

    Decoder.start = started
    PlainEngine.evaluate = watched("evaluate", PlainEngine.evaluate)
    Saver.save, training.load = watched("save", Saver.save), watched("resume", training.load)


def run(counts: Counts, output: Path, ranks: int, arguments: list[str]) -> None:
    """Train until the counted step has ended, and exit."""
    import megatron.training.exchange as exchange
    from megatron.config.arithmetic import machine

    machine.has_gpu = lambda: True
    exchange.mean_loss = lambda sums: 1.0  # nothing was computed: there were no labels
    if ranks > 1:
        pretend_ranks(ranks)
    folder = tempfile.mkdtemp()
    files = [each for each in arguments if "=" not in each]
    given = [each for each in arguments if "=" in each]
    own = [f"training.steps={STEPS}", "schedule.warmup_steps=1", f"run.dir={folder}", "checkpoint.every=null"]
    sys.argv = ["train.py", *files, *own, "evaluation.at_end=false", "logging.curve=false", *given]
    (watch_life if LIFE in output.name else watch_steps)(counts, output)
    from megatron.training.run import train

    raise SystemExit(train() or "the run ended before its steps were counted")


def fork(counts: Counts, jobs: list[tuple[str, int, list[str]]]) -> None:
    """Run (output, ranks, arguments) one after another, each in a process of its own that need not import torch."""
    os.environ["STAND_IN_GPUS"] = "8"  # torch asks once
    import torch

    import megatron.engine.preload
    import megatron.training.run  # noqa: F401

    torch.cuda.init()  # torch refuses it after a fork
    torch.cuda._is_in_bad_fork = lambda: False  # a real device cannot be used after a fork, this one can
    for output, ranks, arguments in jobs:
        child = os.fork()
        if not child:
            with open(f"{output}.log", "w") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
                try:
                    run(counts, Path(output), ranks, arguments)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(1)
        os.waitpid(child, 0)


def main(arguments: list[str]) -> None:
    counts = Counts(ctypes.CDLL(os.environ["LD_PRELOAD"]))
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is no part of the stand-in
    use_first_configurations()
    if arguments[0].endswith(".jobs"):
        fork(counts, json.loads(Path(arguments[0]).read_text()))
    else:
        run(counts, Path(arguments[0]), int(arguments[1]), arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])

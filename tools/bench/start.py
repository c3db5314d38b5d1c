#!/usr/bin/env python
"""Measure how long it takes from a command to the end of its first step, on 1, 2 and 8 ranks of this host.

    OMP_NUM_THREADS=1 python tools/bench/start.py --ranks 1 2 8

Ours is `deepy.py train.py` on a tiny model with one step: configuration, launcher, watch, data, engine, step, metrics,
ledger. The peer is the shortest program that one would write: torchrun, transformers' model of the same shape,
DistributedDataParallel, AdamW, a step on a batch made of random numbers. Both end after the step, and the end is
counted. Wall seconds, or with `--clock cpu` processor seconds of all processes together.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from megatron.config.words import counted  # noqa: E402
from tools.bench.beside import in_turns, lines, markdown  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PEER = "torchrun, transformers, DistributedDataParallel"
HIDDEN, LAYERS, HEADS = 32, 2, 4  # of configs/test/tiny_neox.yml
WORDS, LENGTH, SAMPLES = 64, 32, 8


def plain() -> NoReturn:
    """A rank of the peer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = GPTNeoXConfig(**sizes, intermediate_size=4 * HIDDEN, vocab_size=WORDS)
    model = DistributedDataParallel(GPTNeoXForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(WORDS, (SAMPLES // dist.get_world_size(), LENGTH))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"loss {float(loss):.4f}")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the end of DistributedDataParallel's reducer may wait for a thread of gloo that waits for the GIL


def ours(ranks: int, folder: str) -> list[str]:
    values = {
        "model.vocab_size": WORDS,
        "training.steps": 1,
        "training.sequence_length": LENGTH,
        "training.global_batch_size": SAMPLES,
        "training.micro_batch_size": SAMPLES // ranks,
        "data.synthetic": "copy",
        "run.dir": f"{folder}/run",
        "logging.console": "quiet",
        "logging.curve": "false",
        "schedule.warmup_steps": 0,
        "evaluation.at_end": "false",
        "checkpoint.at_end": "false",
    }
    given = [str(ROOT / "configs" / "test" / "tiny_neox.yml"), *(f"{key}={value}" for key, value in values.items())]
    return [sys.executable, str(ROOT / "deepy.py"), "--ranks", str(ranks), str(ROOT / "train.py"), *given]


def theirs(ranks: int, folder: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", __file__]


def run(make: Any, ranks: int, clock: str) -> float:
    """Seconds of a command.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        before, begin = os.times(), time.perf_counter()
        done = subprocess.run(make(ranks, folder), capture_output=True, text=True, check=False, cwd=folder)
        end, after = time.perf_counter(), os.times()
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip())[-400:])
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return end - begin if clock == "wall" else used


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 8], choices=(1, 2, 4, 8))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given, made = parser.parse_args(arguments), []
    for ranks in given.ranks:
        ways = {
            "ours": functools.partial(run, ours, ranks, given.clock),
            PEER: functools.partial(run, theirs, ranks, given.clock),
        }
        try:
            made += lines(f"command to first step, {counted(ranks, 'rank')}", "s", in_turns(ways, given.rounds))
        except RuntimeError as error:
            print(f"{counted(ranks, 'rank')}: {error}", file=sys.stderr)
            return 1
    print(json.dumps(made) if given.json else markdown(made))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    if "RANK" in os.environ:
        plain()
    sys.exit(piped(main))

#!/usr/bin/env python
"""Write a checkpoint again as another layout would have written it.

    deepy checkpoint reshape runs/x/checkpoints/step_00001000 OUT --to tensor=4,pipeline=2,zero=1 --verify

A run does not need this: it resumes from any checkpoint on any layout.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python looks in a script's own folder first, where `inspect.py` would stand in for the standard library's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
import resource
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.reshape import VERIFY_NAME, parse_layout, reshape
from megatron.checkpoint.save.progress import now_and_then
from megatron.config import ConfigError, resolve
from megatron.config.admitted import add_flag
from megatron.config.derive import View
from megatron.config.problems import counted
from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse
from megatron.parallel.layout.layout import Layout


def refuse_illegal(config: str, layout: Layout, whose: str) -> None:
    """Raise where no run of the checkpoint `whose`, with this configuration, could be cut like that.

    Raises:
        ConfigError: with the rules that the layout breaks.
    """
    values, _, _ = parse(config, lambda _line: Origin("values"))
    if not values or "training" not in values:
        return  # weights that were imported, of no run
    for section in ("hooks", "logging", "launch"):  # no rule about a layout needs what they name
        values.pop(section, None)
    values["parallel"] = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    if layout.context > 1:
        values["parallel"] |= {"context": layout.context}
    if layout.shares_rows or layout.depth > 1:
        shared = {"folded": layout.context} if layout.shares_rows else {"depth": layout.depth}
        values["parallel"] |= {**shared, "expert": layout.expert if View(values).uses("moe") else 1}
    elif layout.spreads_experts:
        values["parallel"] |= {"expert": layout.expert, "expert_tensor": 1 if layout.folded else layout.tensor}
    values["zero"] = {"stage": layout.zero_stage}
    # The batch is the next run's to choose: one that every layout can divide.
    values["training"] |= {"micro_batch_size": 1, "global_batch_size": layout.data, "accumulation": 1}
    try:
        resolve(values, ranks=layout.world_size, whose=whose)
    except ConfigError as error:  # without the warnings of a file in which every option is given
        raise ConfigError([each for each in error.problems if each.fatal]) from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path, help="directory of the checkpoint to read")
    add("out", type=Path, help="directory of the new checkpoint, which must not exist")
    add(
        "--to",
        required=True,
        metavar="LAYOUT",
        help="tensor=N,pipeline=N,context=N,data=N,zero=N,expert=N,expert_tensor=N,folded=N,depth=N. An "
        "omitted number is 1 (zero: 0, expert_tensor: tensor)",
    )
    add("--verify", action="store_true", help=f"compare SHA-256 of every logical tensor, and write {VERIFY_NAME}")
    add("--json", action="store_true", help="print one JSON document")
    add_flag(parser)
    options = parser.parse_args(arguments)
    try:
        layout = parse_layout(options.to)
        source = open_checkpoint(options.checkpoint, verify="checksums")
        refuse_illegal(source.meta.config, layout, f"checkpoint {options.checkpoint}")
        tell = now_and_then(quiet=options.json)
        sums = reshape(source, options.out, layout, verify=options.verify, progress=tell)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"reshape: {error}", file=sys.stderr)
        return 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.json:
        print(json.dumps({"out": str(options.out), "layout": options.to, "peak_bytes": peak, "sha256": sums}))
        return 0
    print(
        f"wrote {options.out}: step {source.step} in the files of {counted(layout.world_size, 'rank')}, "
        f"peak memory {peak / 2**20:.0f} MiB"
    )
    if options.verify:
        count = sum(map(len, sums.values()))
        print(f"verified: {count} logical tensors have the same SHA-256 before and after ({VERIFY_NAME})")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))

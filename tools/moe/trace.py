#!/usr/bin/env python3
"""Show which experts the tokens of a batch use.

The routing is that of a checkpoint on a step of its run's data.

    python tools/moe/trace.py runs/my_run                          the newest checkpoint, on the batch of step 0
    python tools/moe/trace.py runs/my_run --step 500 --samples 2   of another batch, its first two samples
    python tools/moe/trace.py runs/my_run --output trace.jsonl     a line per token and layer

A line has sample, position, token (the id), layer, experts (the chosen ones, best first, where the number after the
last expert means no expert) and weights. A summary comes first: per layer, the largest load over an even share, the
number of unused experts, and the number of choices of no expert.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron.model.stack import Model

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def rows(model: Model, tokens: torch.Tensor, **extras: torch.Tensor) -> Iterator[dict]:
    """A row per token and layer of tokens [B, S], as described above. `extras` are their positions and documents, if
    any.
    """
    from megatron.kinds.moe.trace import traced

    for layer, (experts, weights) in traced(model, tokens, **extras).items():
        for sample in range(tokens.shape[0]):
            for position in range(tokens.shape[1]):
                yield {
                    "sample": sample,
                    "position": position,
                    "token": int(tokens[sample, position]),
                    "layer": layer,
                    "experts": experts[sample, position].tolist(),
                    "weights": [round(weight, 6) for weight in weights[sample, position].tolist()],
                }


def summary(found: list[dict], experts: dict[int, int]) -> list[str]:
    """A line per layer: the largest load over an even share, the unused experts, choices of no expert."""
    lines = []
    for layer, count in experts.items():
        loads = [0] * (count + 1)
        for row in (each for each in found if each["layer"] == layer):
            for expert in row["experts"]:
                loads[expert] += 1
        none = loads.pop()
        lines.append(
            f"layer {layer}: largest load over an even share {max(loads) * count / max(sum(loads), 1):.3f}, "
            f"{loads.count(0)} of {count} experts unused" + (f", {none} choices of no expert" if none else "")
        )
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a run's directory, a folder of checkpoints, or a checkpoint")
    parser.add_argument("--step", type=int, default=0, help="the update whose batch is read (default 0)")
    parser.add_argument("--samples", type=int, help="number of samples (default: a micro-batch)")
    parser.add_argument("--output", type=Path, help="write the rows here (default: standard output)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if options.step < 0 or (options.samples is not None and options.samples < 1):
        parser.error("--step must be at least 0, and --samples at least 1")
    import torch

    from megatron.checkpoint.format.errors import CheckpointError
    from megatron.config.file_access import OutputError, keep_inputs
    from megatron.data.loader import build_loader
    from megatron.kinds.moe.trace import moe_layers
    from megatron.training.text import find_checkpoint, load_model

    try:
        model, config = load_model(find_checkpoint(options.path), torch.device("cpu"), torch.float32)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output is not None:
        read = [Path(f"{each.path}{ending}") for each in config.data.train for ending in (".bin", ".idx")]
        read += [each for each in options.path.rglob("*") if each.is_file()]
        try:
            keep_inputs([options.output], read)
        except OutputError as error:
            print(error, file=sys.stderr)
            return 2
    layers = {layer: moe.options.experts for layer, moe in moe_layers(model).items()}
    if not layers:
        print(f"{options.path}: the model has no layer of kind moe: {config.model.layers}", file=sys.stderr)
        return 2
    loader = build_loader(config, data_rank=0, data_ranks=1)
    try:
        batch, count = loader.step(options.step), options.samples or config.training.micro_batch_size
    finally:
        loader.close()
    extras = {name: getattr(batch, name).flatten(0, 1)[:count] for name in model.form.optional if name != "samples"}
    found = list(rows(model, batch.tokens.flatten(0, 1)[:count, :-1], **extras))
    told = summary(found, layers)
    if options.json:
        print(json.dumps({"summary": told, "rows": found}))
        return 0
    print("\n".join(told), file=sys.stderr if options.output is None else sys.stdout)
    text = "".join(json.dumps(row) + "\n" for row in found)
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(lambda: main(sys.argv[1:])))

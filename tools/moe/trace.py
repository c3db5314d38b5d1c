#!/usr/bin/env python3
"""Show which experts the tokens of a batch use.

The routing is that of a checkpoint on a step of its run's data.

    deepy moe trace runs/my_run                          the newest checkpoint, on the batch of step 0
    deepy moe trace runs/my_run --step 500 --samples 2   of another batch, its first two samples
    deepy moe trace runs/my_run --output trace.jsonl     a line per token and layer
    deepy moe trace runs/my_run --placement places.json --ranks 4   a placement of the experts on ranks

A line has sample, position, token (the id), layer, experts (the chosen ones, best first, where the number after the
last expert means no expert) and weights. A summary comes first: per layer, the largest load over an even share, the
number of unused experts, and the number of choices of no expert.

A placement has each rank's experts of each layer, such that most tokens find their experts of consecutive layers on one
rank. The report is for the batch of the next step, which the placement has not read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from megatron.data.batch import StepBatch
    from megatron.model.stack import Model

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config.file_access import OutputError, keep_inputs, writing  # noqa: E402
from megatron.extras import require  # noqa: E402


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


def placement(fit: list[np.ndarray], test: list[np.ndarray], names: list[int], experts: int, options: Any) -> dict:
    """The document of a placement, from the choices [T, k] of each layer of two batches."""
    from megatron.kinds.moe.placement import crossings, in_order, placed_on_hosts, transitions, within

    counts, checked = transitions(fit, experts), transitions(test, experts)
    found = placed_on_hosts(counts, options.hosts, options.ranks, options.seconds)
    plain, own = in_order(len(fit), experts, options.ranks), options.ranks // options.hosts
    both, total = {"in order": plain, "placed": found.ranks_LE}, checked.sum()
    return {
        "ranks": options.ranks,
        "experts": {
            name: [[e for e in range(experts) if places[e] == rank] for rank in range(options.ranks)]
            for name, places in zip(names, found.ranks_LE.tolist())
        },
        "proven": found.proven,
        "within_a_rank": {
            name: {"fitted": within(counts, each) / counts.sum(), "next": within(checked, each) / total}
            for name, each in both.items()
        },
        "hosts": options.hosts,
        "within_a_host": {
            name: {"fitted": within(counts, each // own) / counts.sum(), "next": within(checked, each // own) / total}
            for name, each in both.items()
        },
        "rows_to_other_hosts": {
            name: dict(zip(("two_exchanges", "one_exchange"), crossings(test, each // own)))
            for name, each in both.items()
        },
        "rows_to_other_ranks": {
            name: dict(zip(("two_exchanges", "one_exchange"), crossings(test, each))) for name, each in both.items()
        },
    }


def placement_lines(document: dict) -> list[str]:
    """A placement for the console."""
    lines = [
        f"placement on {document['ranks']} ranks, {'the best' if document['proven'] else 'the best that was found'}"
    ]
    for name, shares in document["within_a_rank"].items():
        rows = document["rows_to_other_ranks"][name]
        lines.append(
            f"{name}: {shares['fitted']:.1%} of the transitions are within a rank, {shares['next']:.1%} in the next "
            f"batch. Rows to other ranks per token and layer: {rows['two_exchanges']:.3f} with two all-to-alls, "
            f"{rows['one_exchange']:.3f} with one"
        )
        if document["hosts"] > 1:
            shares, rows = document["within_a_host"][name], document["rows_to_other_hosts"][name]
            lines.append(
                f"{name}: {shares['fitted']:.1%} are within a host, {shares['next']:.1%} in the next batch. Rows to "
                f"other hosts: {rows['two_exchanges']:.3f} and {rows['one_exchange']:.3f}"
            )
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a run's directory, a folder of checkpoints, or a checkpoint")
    parser.add_argument("--step", type=int, default=0, help="the update whose batch is read (default 0)")
    parser.add_argument("--samples", type=int, help="number of samples (default: a micro-batch)")
    parser.add_argument("--output", type=Path, help="file of the rows (default: standard output)")
    parser.add_argument("--placement", type=Path, metavar="FILE", help="write a placement of the experts on ranks")
    parser.add_argument("--ranks", type=int, help="with --placement: expert parallel ranks")
    parser.add_argument(
        "--hosts", type=int, default=1, help="hosts of these ranks, which are placed within a host first (default 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="limit of the integer program, in seconds (default 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _inputs(model: Model, batch: StepBatch, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens of the first samples of a batch, and their positions and documents, if any."""
    extras = {name: getattr(batch, name).flatten(0, 1)[:count] for name in model.form.optional if name != "samples"}
    return batch.tokens.flatten(0, 1)[:count, :-1], extras


def _choices(model: Model, batch: StepBatch, count: int) -> list[np.ndarray]:
    """The chosen experts [T, k] of each layer."""
    from megatron.kinds.moe.trace import traced

    tokens, extras = _inputs(model, batch, count)
    return [experts.flatten(0, 1).numpy() for experts, _ in traced(model, tokens, **extras).values()]


def main(arguments: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.placement is None) != (options.ranks is None):
        parser.error("--placement and --ranks need each other")
    if options.ranks is None and options.hosts != 1:
        parser.error("--hosts needs --placement and --ranks")
    if options.ranks is not None:
        require("scipy")
    if options.step < 0 or (options.samples is not None and options.samples < 1):
        parser.error("--step must be at least 0, and --samples at least 1")
    try:
        return _run(options)
    except OutputError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    import torch

    from megatron.checkpoint.format.errors import CheckpointError
    from megatron.data.loader import build_loader
    from megatron.kinds.moe.trace import moe_layers
    from megatron.training.text import find_checkpoint, load_model

    try:
        model, config = load_model(find_checkpoint(options.path), torch.device("cpu"), torch.float32)
        read = [Path(f"{each.path}{ending}") for each in config.data.train for ending in (".bin", ".idx")]
        read += [each for each in options.path.rglob("*") if each.is_file()]
        keep_inputs([each for each in (options.output, options.placement) if each is not None], read)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    layers = {layer: moe.options.experts for layer, moe in moe_layers(model).items()}
    if not layers:
        print(f"{options.path}: the model has no layer of kind moe: {config.model.layers}", file=sys.stderr)
        return 2
    if options.ranks and (wrong := _not_placed(layers, options.ranks, options.hosts)):
        print(f"{options.path}: {wrong}", file=sys.stderr)
        return 2
    loader = build_loader(config, data_rank=0, data_ranks=1)
    try:
        batches = [loader.step(options.step + further) for further in range(1 + (options.ranks is not None))]
        count = options.samples or config.training.micro_batch_size
    finally:
        loader.close()
    if options.ranks:
        own = [_choices(model, batch, count) for batch in batches]
        document = placement(own[0], own[1], list(layers), next(iter(layers.values())), options)
        with writing(options.placement, "--placement"):
            options.placement.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(document) if options.json else "\n".join(placement_lines(document)))
        return 0
    tokens, extras = _inputs(model, batches[0], count)
    _show(list(rows(model, tokens, **extras)), layers, options)
    return 0


def _not_placed(layers: dict[int, int], ranks: int, hosts: int) -> str | None:
    """The reason why experts [layer -> number] have no placement."""
    if len(layers) < 2 or len({*layers.values()}) > 1:
        return "a placement needs two layers with experts or more, and equal numbers of experts in each"
    experts = next(iter(layers.values()))
    if hosts < 1 or ranks % hosts:
        return f"--hosts must be at least 1 and divide the {ranks} ranks, not {hosts}"
    return (
        f"--ranks must be above 1 and divide the {experts} experts, not {ranks}"
        if ranks < 2 or experts % ranks
        else None
    )


def _show(found: list[dict], layers: dict[int, int], options: argparse.Namespace) -> None:
    told = summary(found, layers)
    if options.json:
        print(json.dumps({"summary": told, "rows": found}))
        return
    print("\n".join(told), file=sys.stderr if options.output is None else sys.stdout)
    text = "".join(json.dumps(row) + "\n" for row in found)
    if options.output is None:
        sys.stdout.write(text)
    else:
        with writing(options.output):
            options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(lambda: main(sys.argv[1:])))

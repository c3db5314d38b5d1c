#!/usr/bin/env python3
"""Show, check and convert configurations without starting a run.

    deepy config show a.yml b.yml training.steps=500     the resolved configuration
    deepy config explain optimizer.lr a.yml              value, origin and meaning of a key
    deepy config check --ranks 8 a.yml                   everything a start on 8 ranks would refuse
    deepy config layers a.yml                            the layers with their counts
    deepy config schedule a.yml                          the learning rate
    deepy config convert neox1.yml neox2.yml             GPT-NeoX's flat files as native YAML
    deepy config coordinate-check a.yml --widths 64,128,256   activations over widths (or depths) and steps
    deepy config diff a.yml runs/b                       the values in which two configurations differ
    deepy config docs                                    write docs/configuration.md and its JSON schema

`--json` prints one JSON document. Exit status 2: the configuration or the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.command.given_options import status  # noqa: E402
from megatron.config import ConfigError, Problem, Resolved, config_hash, load, split_arguments, to_yaml  # noqa: E402
from megatron.config.arithmetic import machine  # noqa: E402
from megatron.config.arithmetic.batches import batches_of  # noqa: E402
from megatron.config.file_access import keep_inputs, writing  # noqa: E402
from megatron.config.problems import aligned, counted  # noqa: E402
from megatron.config.rules.data import blends_of, passes_over  # noqa: E402
from megatron.config.show.reference import explain  # noqa: E402
from megatron.config.tree import thaw  # noqa: E402


def _load(options: argparse.Namespace, inputs: bool) -> Resolved:
    files, overrides = split_arguments(options.arguments)
    if not files:
        rule = "a configuration is at least one YAML file"
        raise ConfigError([Problem("", rule, "name one: a.yml", where="command line")])
    return load(files, overrides, ranks=options.ranks, check_inputs=inputs, here=not inputs or _here(options))


def _here(options: argparse.Namespace) -> bool:
    """Whether this machine could be the host of all ranks. A login node is not: it has no GPU, and fewer cores."""
    elsewhere = getattr(options, "gpu", None) is not None
    return not elsewhere and (machine.has_gpu() or (options.ranks or 1) <= max(os.cpu_count() or 1, 8))


def _emit(options: argparse.Namespace, text: str, document: dict[str, Any]) -> None:
    """The answer on standard output: text, or one JSON document."""
    print(json.dumps(document, indent=2, ensure_ascii=False) if options.json else text.rstrip("\n"))


def _remarks(resolved: Resolved) -> None:
    if resolved.summary():
        print(resolved.summary(), file=sys.stderr)


def show(options: argparse.Namespace) -> None:
    """The resolved configuration, each value with its origin."""
    resolved = _load(options, inputs=False)
    _remarks(resolved)
    _emit(
        options,
        to_yaml(resolved),
        {
            "config": thaw(resolved.config.model_dump()),
            "origins": {key: origin.to_json() for key, origin in resolved.origins.items()},
            "overridden": [each.to_json() for each in resolved.overridden],
            "warnings": [each.to_json() for each in resolved.warnings],
            "notes": list(resolved.notes),
            "ranks": resolved.ranks,
            "hash": config_hash(resolved.config),
        },
    )


def explain_key(options: argparse.Namespace) -> None:
    """Value, origin and meaning of a key. Without files, only its meaning."""
    resolved = _load(options, inputs=False) if options.arguments else None
    entries = explain(options.key, resolved)
    documents = [each.to_json() for each in entries]
    document = documents[0] if len(documents) == 1 else {"key": options.key, "keys": documents}
    _emit(options, "\n\n".join(each.text() for each in entries), document)


def _amount(resolved: Resolved, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Size of the run: tokens, passes over its data, and on the device of `--gpu` days and GPU-hours."""
    config, ranks = resolved.config, resolved.ranks
    training = config.training
    found: dict[str, float] = {}
    text = f"\n{training.steps:,} steps"
    if training.global_batch_size is not None:
        found["tokens"] = batches_of(config).before(training.steps) * training.sequence_length
        text += f" = {found['tokens']:,} tokens"
    blends = [passes_over(config, sources, steps) for _, sources, steps in blends_of(config)]
    if blends and None not in blends:
        found["passes"] = max(each[0] for each in blends if each)
        text += f" = {found['passes']:.3g} {'passes' if found['passes'] != 1 else 'pass'} over the training data"
    if ranks and options.gpu:
        from megatron.plan.devices import cluster
        from megatron.plan.prediction import predict, span

        at = cluster(ranks, options.gpu)
        try:
            prediction = predict(config, ranks, at.device.name, at.per_host)
        except Exception as error:  # a kind of a user's own may have no counts, or the vocabulary's size is unknown
            prediction = None
            text += f". No days and GPU-hours, since the formulas fail: {type(error).__name__}: {error}"
        if prediction:
            batches, need = batches_of(config), prediction.corrected
            full = batches.before(training.steps) / batches.sizes[-1]  # as steps of training.global_batch_size
            seconds = need.seconds * full
            found |= {"seconds": seconds, "gpu_hours": seconds * ranks / 3600, "memory": need.memory}
            text += f"\n{span(seconds)} and {found['gpu_hours']:,.0f} GPU-hours of {at.device.name}\n"
            text += prediction.text(training.steps, full)
    elif ranks:
        text += " (give --gpu NAME for days and GPU-hours)"
    return text, found


def check(options: argparse.Namespace) -> None:
    """Everything that would keep a run from starting."""
    resolved = _load(options, inputs=True)
    _remarks(resolved)
    config, ranks = resolved.config, resolved.ranks
    parallel, training = config.parallel, config.training
    inner = parallel.tensor * parallel.columns * parallel.pipeline * parallel.context
    layout = {
        "ranks": ranks,
        "tensor": parallel.tensor,
        "columns": parallel.columns,
        "pipeline": parallel.pipeline,
        "context": parallel.context,
        "data": ranks // inner if ranks else None,
        "expert": parallel.expert,
        "expert_tensor": parallel.expert_tensor,
        "zero": config.zero.stage,
    }
    batch = {
        "global_batch_size": training.global_batch_size,
        "micro_batch_size": training.micro_batch_size,
        "accumulation": training.accumulation,
    }
    text = f"{config.run.name}: no problems"
    if ranks:
        folded = parallel.expert_tensor < parallel.tensor
        columns = f" x columns {parallel.columns}" if parallel.columns > 1 else ""
        shared = f"context {parallel.context} x " if parallel.context > 1 else ""
        same = "data and context" if parallel.context > 1 else "data"
        over = f"tensor and {same} ranks, whole on each" if folded else f"{same} ranks"
        shared += f"depth {parallel.depth} of " if parallel.depth > 1 else ""
        spread = f", experts over {parallel.expert} {over}" if parallel.expert > 1 or folded else ""
        text += (
            f" on {counted(ranks, 'rank')} (tensor {parallel.tensor}{columns} x pipeline {parallel.pipeline} x "
            f"{shared}data "
            f"{layout['data']}{spread}, "
            f"ZeRO {config.zero.stage}): {batch['global_batch_size']} samples per step = micro-batch "
            f"{batch['micro_batch_size']} x accumulation {batch['accumulation']} x data {layout['data']}"
        )
    else:
        text += ". Rules that depend on the number of ranks were not checked (give --ranks)"
    if ranks and not _here(options):
        text += "\nchecked for other hosts than this machine: its memory, disks and programs were not checked"
    amount, figures = _amount(resolved, options)
    text += amount
    _emit(
        options,
        text,
        {
            "ok": True,
            "layout": layout,
            "batch": batch,
            **figures,
            "hash": config_hash(config),
            "warnings": [each.to_json() for each in resolved.warnings],
            "notes": list(resolved.notes),
        },
    )


def layers(options: argparse.Namespace) -> None:
    """The layers with their parameters, FLOPs, bytes and stages, counted by the layers themselves."""
    from megatron.model.costs.describe import layers_table, totals

    resolved = _load(options, inputs=False)
    if resolved.config.model.vocab_size is None:
        rule = "counting parameters needs the vocabulary's size"
        fix = "give model.vocab_size, or a local tokenizer in tokenizer.path"
        raise ConfigError([Problem("model.vocab_size", rule, fix, None)])
    rows, total = layers_table(resolved.config), totals(resolved.config)
    text = _table([_shown(row, number) for row, number in _equal(rows)])
    text += [
        f"parameters: {total.parameters:,} ({total.non_embedding_parameters:,} without embeddings)"
        + (f", {total.active_parameters:,} active per token" if total.active_parameters < total.parameters else ""),
        f"FLOPs per token: {total.forward_flops:,} forward, {total.training_flops:,} forward and backward"
        + (f", {total.hardware_flops:,} with recomputation" if total.hardware_flops > total.training_flops else ""),
    ]
    _emit(
        options,
        "\n".join(text),
        {
            "parameters": total.parameters,
            "non_embedding_parameters": total.non_embedding_parameters,
            "active_parameters": total.active_parameters,
            "forward_flops": total.forward_flops,
            "training_flops": total.training_flops,
            "hardware_flops": total.hardware_flops,
            "layers": rows,
        },
    )


def _equal(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Adjacent layers that differ only in their names, with their number."""
    groups = groupby(rows, key=lambda row: {name: value for name, value in row.items() if name != "name"})
    members = [list(group) for _, group in groups]
    return [
        (
            {**group[0], "name": f"{group[0]['name']} ... {group[-1]['name']}"} if len(group) > 1 else group[0],
            len(group),
        )
        for group in members
    ]


def _shown(row: dict[str, Any], number: int) -> dict[str, str | int | float | None]:
    """A row of the table with bytes in units, and its number of layers."""
    shown = {"name": row["name"], "kind": row["kind"], "layers": number}
    for name, value in row.items():
        if name.endswith("_bytes"):
            shown[name.removesuffix("_bytes")] = _size(value)
        elif name not in shown:
            shown[name] = value
    return shown


def _size(number: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,} B"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table. All columns except the first two are numbers."""
    return aligned([list(rows[0]), *([_cell(row[name]) for name in rows[0]] for row in rows)], left=2)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def schedule(options: argparse.Namespace) -> None:
    """The learning rate of every step as a curve, or all points as JSON."""
    from megatron.report.curve import draw
    from megatron.training.schedule import curve

    config = _load(options, inputs=False).config
    if config.schedule.warmup_tokens is not None and config.training.global_batch_size is None:
        rule, fix = (
            "tokens per step depend on training.global_batch_size",
            "give --ranks, or training.global_batch_size",
        )
        raise ConfigError([Problem("schedule.warmup_tokens", rule, fix, config.schedule.warmup_tokens)])
    points = curve(config)
    (first, start), (last, end) = points[0], points[-1]
    told = f"peak {config.optimizer.lr:g}, step {first}: {start:.6g}, last step {last}: {end:.6g}"
    _emit(
        options,
        draw({"lr": points}, title="learning rate by step") + "\n" + told,
        {"peak": config.optimizer.lr, "points": [{"step": step, "lr": rate} for step, rate in points]},
    )


def convert(options: argparse.Namespace) -> None:
    """GPT-NeoX's flat files as one native file."""
    from megatron.config.source.files import convert as translated

    text = translated(options.arguments)
    if options.output:
        keep_inputs([options.output], [each for each in options.arguments if Path(each).is_file()])
        with writing(options.output):
            Path(options.output).write_text(text, encoding="utf-8")
    _emit(options, f"wrote {options.output}" if options.output else text, {"output": options.output, "yaml": text})


def coordinate_check(options: argparse.Namespace) -> None:
    """How the size of activations changes with width or depth in the first steps of training, at a constant rate."""
    from megatron.api import coordinates

    axes = [("width", options.widths), ("depth", options.depths)]
    given = [(axis, sizes) for axis, sizes in axes if sizes]
    if len(given) != 1:
        rule = "sizes must be given along one axis"
        raise ConfigError([Problem("", rule, "give --widths 64,128,256, or --depths 2,4,8", where="command line")])
    ((axis, sizes),) = given
    files, overrides = split_arguments(options.arguments)
    found = coordinates.check(files, overrides, axis, sizes, steps=options.steps, seeds=options.seeds)
    if options.output:
        keep_inputs([options.output], [each for each in options.arguments if Path(each).is_file()])
        with writing(options.output):
            coordinates.picture(found, axis, options.output)
    slopes = [{"place": each.place, "slope": each.slope, "verdict": each.verdict} for each in coordinates.slopes(found)]
    points = [vars(each) for each in found]
    document = {"axis": axis, "slopes": slopes, "points": points, "output": options.output}
    _emit(options, coordinates.table(found, axis), document)


def diff(options: argparse.Namespace) -> None:
    """The values in which two configurations differ: files, run directories, or their config.yml."""
    from megatron.config.show.difference import described, differences

    if len(options.arguments) != 2:
        rule = f"two configurations are compared, and here are {len(options.arguments)}"
        raise ConfigError([Problem("", rule, "name two files or run directories", where="command line")])
    a, b = options.arguments
    found = differences(*(described(each, ranks=options.ranks) for each in (a, b)))
    text = "\n".join([f"{len(found)} values differ (- {a}, + {b})", *map(str, found)]) if found else "no value differs"
    _emit(options, text, {"a": a, "b": b, "differences": [each.to_json() for each in found]})


def docs(options: argparse.Namespace) -> None:
    """Write the generated documentation, or with --check verify that it is up to date."""
    from megatron.config.show.reference import editor_schema, pages

    wanted = {ROOT / "docs" / name: text for name, text in pages().items()}
    wanted[ROOT / "docs" / "config.schema.json"] = editor_schema()
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    names = [str(path.relative_to(ROOT)) for path in stale]
    if options.check and stale:
        rule, fix = "generated documentation is out of date: run `make docs`", "run python tools/config.py docs"
        raise ConfigError([Problem("", rule, fix, where=name) for name in names])
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    _emit(options, f"wrote {', '.join(names)}" if names else "up to date", {"written": names})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, action in (
        ("show", show),
        ("explain", explain_key),
        ("check", check),
        ("layers", layers),
        ("schedule", schedule),
        ("convert", convert),
        ("coordinate-check", coordinate_check),
        ("diff", diff),
        ("docs", docs),
    ):
        command = commands.add_parser(name, help=action.__doc__, description=action.__doc__)
        command.set_defaults(action=action)
        command.add_argument("--json", action="store_true", help="print one JSON document")
        if name == "docs":
            command.add_argument("--check", action="store_true", help="fail if the files are not up to date")
            continue
        if name == "explain":
            command.add_argument("key", help="dotted key, such as optimizer.lr, or a section")
        if name == "coordinate-check":
            command.add_argument("--widths", type=_sizes, help="values of model.hidden_size, as in 64,128,256")
            command.add_argument("--depths", type=_sizes, help="numbers of blocks, as in 2,4,8")
            command.add_argument("--steps", type=_count, default=4, help="updates of each model (default: 4)")
            command.add_argument("--seeds", type=_count, default=2, help="models of each size (default: 2)")
            command.add_argument("-o", "--output", help="write a picture (PNG) here")
        elif name == "convert":
            command.add_argument("-o", "--output", help="write this file instead of standard output")
        else:
            command.add_argument(
                "--ranks", type=_ranks, help="processes of the whole run (default: launch.ranks, or unknown)"
            )
        if name == "check":
            command.add_argument("--gpu", metavar="NAME", help="device of the ranks, for days and GPU-hours: h100, ...")
        command.add_argument(
            "arguments",
            nargs="*" if name == "explain" else "+",
            metavar="FILE|KEY=VALUE",
            help="YAML files, merged left to right, and overrides",
        )
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _sizes(text: str) -> list[int]:
    sizes = [_count(each) for each in text.split(",")]
    if len(set(sizes)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} must have at least two different sizes")
    return sizes


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give a whole number of at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(each.startswith("-") for each in rest) or (rest and not hasattr(options, "arguments")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.arguments += rest  # files and overrides after an option
    return status(lambda: options.action(options), options.json)


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))

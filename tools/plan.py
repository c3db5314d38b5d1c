#!/usr/bin/env python3
"""Find the best layout for a run on any machine: whether it fits, its speed and its cost.

    deepy plan a.yml --gpus 512 --gpu h100                     layouts that fit, the fastest first
    deepy plan a.yml --gpus 512 --gpu a100 --network ib200 --price 1.8
    deepy plan a.yml --gpus 64 --gpu h100 --why-not tensor=8,pipeline=2
    deepy plan a.yml --gpus 64 --gpu mine --machine mine.yml   a device of your own
    deepy plan a.yml --gpus 64..1024 --plot scaling.png        weak and strong scaling
    deepy plan a.yml --gpus 64 --budget "20000 gpu-hours"      sizes of the model for a budget
    deepy plan lint a.yml --gpus 64 --layout tensor=4          faults of the model's shape
    deepy plan grids a.yml --gpus 64 --layout pipeline=1       rows, columns and depth, on several networks
    deepy plan schedule a.yml --gpus 8 --plot s.png            the pipeline's schedule and its bubble
    deepy plan score                                           predictions against published runs
    deepy plan history                                         predictions against your own runs
    deepy plan recommend [pythia/70m ...]                      write docs/recommended_layouts.md

`--json` prints one JSON document. Exit status 2: nothing fits, or the configuration or the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.command.given_options import refuse_unread, status  # noqa: E402
from megatron.config import ConfigError, Problem, split_arguments  # noqa: E402
from megatron.config.file_access import keep_inputs, writing  # noqa: E402

if TYPE_CHECKING:
    from megatron.plan.search import Question

_UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}


def search(options: argparse.Namespace) -> None:
    """Layouts that fit, the fastest first."""
    from megatron.plan.advice import document, text, why_nothing_fits
    from megatron.plan.candidate import parse
    from megatron.plan.devices import known_devices

    named = None if options.why_not is None else parse(options.why_not, "--why-not")
    question = _question(options)
    answers = question.answers()
    if not answers.plans:
        raise ConfigError([why_nothing_fits(question, answers, dict(known_devices(options.machine)[0]))])
    if options.json:
        found = document(answers, options.price, named)
        found["failures"] = _failures(options, question.at.devices)
        print(json.dumps(found, indent=2))
    else:
        print(text(answers, options.price, named, options.disk, options.top))
        lost = _failures(options, question.at.devices)
        if lost:
            print(
                f"With {options.failures:g} failures of a device in a day the run takes {lost['factor'] - 1:.1%} "
                f"longer, if it saves every {lost['interval'] / 60:,.0f} minutes (Daly 2006)."
            )


def _failures(options: argparse.Namespace, devices: int) -> dict[str, float] | None:
    from megatron.plan.scaling import failures

    if options.failures is None:
        return None
    try:
        return vars(failures(devices, options.failures, options.save_seconds, options.restart_seconds))
    except OverflowError:
        rule = "must leave time to work: devices fail faster than a run restarts, and it would never end"
        fix = "give fewer failures, or shorter --save-seconds and --restart-seconds"
        raise ConfigError([Problem("--failures", rule, fix, options.failures)]) from None


def _question(options: argparse.Namespace) -> Question:
    from megatron.plan.devices import cluster
    from megatron.plan.search import Question

    files, overrides = _files(options)
    first = options.gpus[0]
    return Question.of(files, overrides, cluster(first, options.gpu, options.hosts, options.network, options.machine))


def scaling(options: argparse.Namespace) -> None:
    """Weak and strong scaling over numbers of devices."""
    from megatron.plan.advice import align_lines
    from megatron.plan.scaling import curve, draw

    if options.plot:
        keep_inputs([options.plot], filter(None, (*_files(options)[0], options.machine)), "--plot")
    question, (first, last) = _question(options), options.gpus
    curves = {"strong": curve(question, first, last, weak=False), "weak": curve(question, first, last, weak=True)}
    if not any(curves.values()):
        rule = "no layout fits on any of these numbers of devices"
        raise ConfigError([Problem("--gpus", rule, "ask for only one number to see why", f"{first}..{last}")])
    if options.plot:
        with writing(options.plot, "--plot"):
            draw(curves["strong"], curves["weak"], options.plot, f"{question.at.device.name}, predicted")
    if options.json:
        print(json.dumps({name: [each.to_json() for each in points] for name, points in curves.items()}, indent=2))
        return
    rows = [["", "devices", "batch", "step s", "tokens/s", "MFU", "efficiency", "layout"]]
    for name, points in curves.items():
        for each in points:
            plan = each.plan
            own = [f"{plan.step.seconds:,.3f}", f"{plan.tokens_per_second:,.0f}", f"{plan.mfu:.1%}"]
            rows.append([name, str(each.devices), str(each.batch), *own, f"{each.efficiency:.0%}", str(plan.choice)])
    print("\n".join(align_lines(rows)))


def budget(options: argparse.Namespace) -> None:
    """Sizes of the model that a budget trains."""
    from megatron.plan.advice import align_lines
    from megatron.plan.scaling import proposals

    question = _question(options)
    lost = _failures(options, question.at.devices)
    hours = options.budget / (lost["factor"] if lost else 1.0)
    found = proposals(question, hours, options.tokens_per_parameter)
    if not found:
        rule = (
            "no size of this architecture can be trained. Stacks of softmax attention and dense networks can be scaled"
        )
        raise ConfigError([Problem("--budget", rule, "give more hours, or another architecture", options.budget)])
    if options.json:
        print(json.dumps({"device_hours": options.budget, "proposals": [each.to_json() for each in found]}, indent=2))
        return
    rows = [["parameters", "blocks", "hidden", "tokens", "gpu-hours", "days", "MFU", "layout"]]
    for each in found:
        shape = [f"{each.parameters / 1e9:,.2f} B", str(each.layers), str(each.hidden), f"{each.tokens / 1e9:,.1f} B"]
        days = each.hours / 24 / question.at.devices
        plan = each.plan
        rows.append([*shape, f"{each.hours:,.0f}", f"{days:,.1f}", f"{plan.mfu:.1%}", str(plan.choice)])
    print("\n".join(align_lines(rows)))


def grids(options: argparse.Namespace) -> None:
    """Rows, columns and depth of tensor parallel ranks, and where each is the fastest."""
    from megatron.plan.advice import why_nothing_fits
    from megatron.plan.candidate import parse
    from megatron.plan.devices import known_devices
    from megatron.plan.grids import Grids

    question = _question(options)
    answers = question.answers({"context": 1} | ({} if options.layout is None else parse(options.layout, "--layout")))
    devices, networks = known_devices(options.machine)
    if not answers.plans:
        raise ConfigError([why_nothing_fits(question, answers, dict(devices))])
    found = Grids(answers, networks)
    print(json.dumps(found.document(), indent=2) if options.json else found.text(options.top))


def lint(options: argparse.Namespace) -> None:
    """Problems with the model's shape for a layout: the named one, or the fastest."""
    from megatron.plan.advice import why_nothing_fits
    from megatron.plan.candidate import Candidate, parse
    from megatron.plan.devices import known_devices
    from megatron.plan.lint import lint as findings

    question = _question(options)
    if options.layout is not None:
        named = parse(options.layout, "--layout")
        choice = Candidate(**{"sequence": named.get("tensor", 1) > 1 == named.get("columns", 1), **named})
        question.resolved(choice)  # a layout that the launcher refuses is refused here
    else:
        answers = question.answers()
        if not answers.plans:
            raise ConfigError([why_nothing_fits(question, answers, dict(known_devices(options.machine)[0]))])
        choice = answers.plans[0].choice
    found = findings(question, choice)
    if options.json:
        print(json.dumps({"layout": vars(choice), "findings": [vars(each) for each in found]}, indent=2))
    else:
        print(f"layout: {choice}")
        print("\n".join(map(str, found)) or "nothing to say: the shape fits the device")


def schedule(options: argparse.Namespace) -> None:
    """The schedule of a configuration's pipeline."""
    from megatron.config import load
    from megatron.plan.schedule import document, draw, text

    files, overrides = _files(options)
    config = load(files, overrides, ranks=options.gpus[0], check_inputs=False).config
    if options.plot:
        keep_inputs([options.plot], files, "--plot")
        with writing(options.plot, "--plot"):
            draw(config, options.plot)
    print(json.dumps(document(config), indent=2) if options.json else text(config))


def score(options: argparse.Namespace) -> None:
    """Predictions against published runs."""
    from megatron.plan.score import fit, markdown, summary
    from megatron.plan.score import score as scored

    if options.fit:
        print(json.dumps(fit(), indent=2))
        return
    found = scored()
    sums = {
        "fitted": summary([each for each in found if each.run.fitted]),
        "scored": summary([each for each in found if not each.run.fitted]),
    }
    if options.json:
        rows = [{**each.run.values, "predicted": each.predicted, "error": each.error} for each in found]
        print(json.dumps({"runs": rows, **sums}, indent=2))
        return
    print(markdown(found))
    for name, own in sums.items():
        print(f"{name}: median error {own['median']:.0%}, largest {own['worst']:.0%}")


def history(options: argparse.Namespace) -> None:
    """Predicted and measured needs of this account's runs."""
    from megatron.plan.advice import align_lines
    from megatron.plan.prediction import document, errors, history_file, read_history

    entries = read_history()
    if options.json:
        print(json.dumps(document(entries), indent=2))
        return
    if not entries:
        print(f"{history_file()} has no runs yet: each one of 13 steps or more adds a line when it ends")
        return
    shown = entries[-options.top :]
    rows = [["device", "type", "ranks", "layout", "step s", "predicted", "off by", "GiB", "predicted", "off by"]]
    for each in shown:
        row = [each.device, each.compute, str(each.ranks), each.layout]
        for measured, predicted, size in (
            (each.measured.seconds, each.predicted.seconds, 1.0),
            (each.measured.memory, each.predicted.memory, 2.0**30),
        ):
            row += [f"{measured / size:,.3g}", f"{predicted / size:,.3g}", f"{measured / predicted - 1:+.0%}"]
        rows.append(row)
    print("\n".join(align_lines(rows)))
    for (device, compute), error in errors(entries).items():
        alone, corrected = error.alone, error.corrected
        line = f"{device}, {compute}: {error.runs} runs, median error of a step {alone.seconds:.0%}, of memory "
        line += f"{alone.memory:.0%} by only the formulas"
        if corrected is not None:
            line += f", {corrected.seconds:.0%} and {corrected.memory:.0%} for the {error.corrections} that earlier "
            line += "runs corrected"
        print(f"\n{line}.")


def recommend(options: argparse.Namespace) -> None:
    """Write docs/recommended_layouts.md. Finished rows are kept when it is stopped."""
    from megatron.rehearsal.recommend import line, name_of, page, ready, renewed

    folder, kept = ROOT / "configs", ROOT / "docs" / "recommended_layouts.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    known = [name_of(path, folder) for path in ready(folder)]
    wrong = [name for name in options.arguments if name not in known]
    if wrong:
        raise ConfigError([Problem("recommend", "must name ready configurations", "such as pythia/70m", wrong[0])])
    rows: dict[str, Any] = {}
    for name, row in renewed(folder, before, options.arguments, options.formulas):
        rows[name] = row
        if row is not before.get(name):
            print(line(name, row), flush=True)
            merged = {each: own for each in known if (own := rows.get(each) or before.get(each))}
            _keep(kept, merged)
    _keep(kept, rows)
    kept.with_suffix(".md").write_text(page(rows), encoding="utf-8")


def _keep(path: Path, values: dict[str, Any]) -> None:
    """Replace a file as a whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def _files(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    files, overrides = split_arguments(options.arguments)
    if not files:
        raise ConfigError([Problem("", "must have a YAML file", "name one: a.yml", where="command line")])
    return list(files), list(overrides)


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 0 < int(word) <= 10**6):
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1,000,000, not {word!r}")
    return int(word)


def _devices(word: str) -> tuple[int, int]:
    first, dots, last = word.partition("..")
    counts = _count(first), _count(last) if dots else _count(first)
    if counts[0] > counts[1]:
        raise argparse.ArgumentTypeError(f"must be FEWEST..MOST, not {word!r}")
    return counts


def _hours(word: str) -> float:
    number, _, unit = word.strip().partition(" ")
    if unit.strip() not in ("", "gpu-hours", "device-hours", "gpu-days"):
        raise argparse.ArgumentTypeError(f"must be in gpu-hours (or gpu-days), not {word!r}")
    return _positive(number) * (24 if unit.strip() == "gpu-days" else 1)


def _positive(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {word!r}")
    return number


def _bytes(word: str) -> float:
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", word.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 500TB, not {word!r}")
    return _positive(match[1]) * _UNITS[match[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="+", metavar="a.yml [key.path=value]", help="configuration of the run")
    parser.add_argument("--gpus", type=_devices, default=(8, 8), help="devices in all, or FEWEST..MOST (default: 8)")
    parser.add_argument("--gpu", default="h100", help="device: h100, a100, h200, b200, mi250x, mi300x, cpu, ...")
    parser.add_argument("--hosts", type=_count, help="number of hosts (default: the fewest that have the devices)")
    parser.add_argument("--network", help="between hosts: ib400 (default), ib200, roce, slingshot, ethernet")
    parser.add_argument("--machine", metavar="FILE", help="further devices and networks (megatron/plan/devices.yml)")
    parser.add_argument("--price", type=_positive, help="of a device for an hour")
    parser.add_argument("--disk", type=_bytes, help="room for checkpoints, such as 500TB")
    parser.add_argument("--why-not", metavar="tensor=8,...", help="explain why this layout was not chosen")
    parser.add_argument("--top", type=_count, default=8, help="layouts to show")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture of the scaling, or of the schedule")
    parser.add_argument("--budget", type=_hours, help='propose sizes of the model: "20000 gpu-hours"')
    parser.add_argument("--tokens-per-parameter", type=_positive, default=20.0, help="with --budget (default: 20)")
    parser.add_argument("--failures", type=_positive, help="failures of a device in a day (Llama 3's run: 0.00047)")
    parser.add_argument(
        "--save-seconds", type=_positive, default=30.0, help="seconds for which a checkpoint stops a run"
    )
    parser.add_argument(
        "--restart-seconds", type=_positive, default=300.0, help="seconds from a failure to the next new step"
    )
    parser.add_argument(
        "--layout", metavar="tensor=4,...", help="of lint (default: the fastest) and grids (default: any)"
    )
    parser.add_argument(
        "--fit", action="store_true", help="score: print efficiencies of devices that are fitted to the published runs"
    )
    parser.add_argument(
        "--formulas", action="store_true", help="recommend: new rows by formulas, to be rehearsed later"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


# Options that each question reads. `arguments` are files, overrides, or names of configurations.
_MACHINE = {"arguments", "gpus", "gpu", "hosts", "network", "machine", "json"}
_FAILURES = {"failures", "save_seconds", "restart_seconds"}
READ: dict[Callable[[argparse.Namespace], None], set[str]] = {
    search: _MACHINE | _FAILURES | {"price", "disk", "why_not", "top"},
    scaling: _MACHINE | {"plot"},
    budget: _MACHINE | _FAILURES | {"budget", "tokens_per_parameter"},
    lint: _MACHINE | {"layout"},
    grids: _MACHINE | {"layout", "top"},
    schedule: {"arguments", "gpus", "plot", "json"},
    score: {"fit", "json"},
    history: {"top", "json"},
    recommend: {"arguments", "formulas"},
}
WORDS = {each.__name__: each for each in (grids, lint, schedule, score, history, recommend)}


def _refuse(parser: argparse.ArgumentParser, options: argparse.Namespace, action: Callable) -> None:
    """Refuse options that would be ignored."""
    fewest, most = options.gpus
    if fewest != most and "gpus" in READ[action] and (action is not scaling or options.why_not is not None):
        rule = "must be one number for this question: a range shows how a run scales"
        raise ConfigError([Problem("--gpus", rule, f"give {fewest} or {most}", f"{fewest}..{most}")])
    if options.plot and action not in (scaling, schedule):
        raise ConfigError([Problem("--plot", "must come with a range of devices", "give --gpus FEWEST..MOST")])
    refuse_unread(parser, options, READ[action] | {"arguments"}, action.__name__)
    if options.arguments and "arguments" not in READ[action]:
        rule = f"must be the only word: {action.__name__} reads no files and no overrides"
        raise ConfigError([Problem("", rule, "remove the word", options.arguments[0], where="command line")])


def main(arguments: list[str] | None = None) -> int:
    """Answer one question and return the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(each.startswith("-") for each in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.arguments += rest  # files and overrides after an option
    action = WORDS.get(options.arguments[0], search)
    if action is not search:
        del options.arguments[0]
    elif options.budget is not None:
        action = budget
    elif options.gpus[0] != options.gpus[1]:
        action = scaling

    def answer() -> None:
        _refuse(parser, options, action)
        action(options)

    return status(answer, options.json)


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))

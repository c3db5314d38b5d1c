#!/usr/bin/env python3
"""Train and compare many runs from one file: sizes, seeds, data and recipes.

    deepy suite ladder.yml plan                  every run with its size and data, without starting
    deepy suite ladder.yml launch --jobs 2       train the runs that are not finished, two at a time
    deepy suite ladder.yml launch --slurm --sbatch=--gpus-per-node=8    write an array job
    deepy suite ladder.yml status
    deepy suite ladder.yml compare               results with their spread over seeds, and report.html
    deepy suite ladder.yml manifest              all of it as JSON, with the hashes of the batches
    deepy suite ladder.yml fit                   a scaling law of the losses, with intervals and a picture
    deepy suite points.csv fit                   the same of a table: run, parameters, tokens, loss

A file with `stages` is a chain, for which there are plan, launch, status and manifest.

Exit status 1: a run failed, or runs that should have read the same batches have not. 2: errors in the files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.command.given_options import refuse_unread  # noqa: E402
from megatron.config import ConfigError  # noqa: E402
from megatron.config.file_access import OutputError, keep_inputs, writing  # noqa: E402
from megatron.config.problems import UserError, aligned  # noqa: E402
from megatron.suite.members import Suite, read_suite  # noqa: E402
from megatron.suite.stages import Chain, read_chain  # noqa: E402

READ = {  # options of each verb
    "plan": {"json"},
    "launch": {"jobs", "index", "slurm", "sbatch"},
    "status": {"json"},
    "compare": {"json"},
    "manifest": {"json"},  # it is JSON in any case
    "fit": {"json", "points", "validation", "without_embeddings", "resamples", "picture"},
}
VERBS = tuple(READ)
MOST = 1_000_000  # resamples
CURVES = 40  # runs whose curves a page can show


def plan(suite: Suite, options: argparse.Namespace) -> int:
    from megatron.report.console import short_number
    from megatron.suite.tables import plan_document

    document = plan_document(suite, suite.resolved(), _states(suite))
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    rows = [["member", "parameters", "steps", "tokens", "FLOPs", "data", "state"]]
    for name, member in document["members"].items():
        rows.append([
            name,
            short_number(member["parameters"]),
            f"{member['steps']:,}",
            short_number(member["tokens"]),
            f"{member['flops']:.2e}",
            member["data"],
            member["state"] + (f", step {member['step']:,}" if member["step"] else ""),
        ])
    members = document["members"].values()
    tokens, flops = sum(each["tokens"] for each in members), sum(each["flops"] for each in members)
    groups = len({each["data"] for each in members})
    closing = (
        f"{len(members)} runs, {short_number(tokens)} tokens, {flops:.2e} FLOPs. Runs with the same name under data "
        f"read the same batches ({groups} of them)"
    )
    print("\n".join([*aligned(rows), "", closing]))
    return 0


def launch(suite: Suite, options: argparse.Namespace) -> int:
    from megatron.suite.queue import train, waiting, write_arrays

    resolved = suite.resolved(check_inputs=True)
    if options.slurm:
        waiting(suite, resolved)
        lines = write_arrays(suite, options.sbatch)
        print("\n  ".join([f"{len(suite.members)} tasks. Submit them with", *lines]))
        return 0
    members = waiting(suite, resolved)
    if options.index is not None:
        if not 0 <= options.index < len(suite.members):
            raise UserError(f"--index must be from 0 to {len(suite.members) - 1}, the members of {suite.path}")
        members = [member for member in members if member is suite.members[options.index]]
    failed = train(suite, members, options.jobs, lambda line: print(line, flush=True))
    done = len(suite.members) - len(waiting(suite, resolved))
    print(f"{done} of {len(suite.members)} runs are finished" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def status(suite: Suite, options: argparse.Namespace) -> int:
    from megatron.suite.tables import last_step, state_word, status_lines

    states, ends = _states(suite), {name: last_step(each) for name, each in suite.resolved().items()}
    if options.json:
        found = {
            name: {"state": state_word(each, ends[name]), "step": each.step, "loss": each.loss}
            for name, each in states.items()
        }
        print(json.dumps(found, indent=2))
        return 0
    print("\n".join(status_lines(states, ends)))
    return 0


def compare(suite: Suite, options: argparse.Namespace) -> int:
    from megatron.suite.tables import agreement_lines, agreements, result_lines, results

    states = _states(suite)
    found, same = results(suite, states), agreements(suite, suite.resolved(), states)
    unlike = any(each.unlike for each in same.values())
    if options.json:
        print(json.dumps({"results": found, "same_batches": not unlike}, indent=2))
        return int(unlike)
    begun = [member.folder for member in suite.members if states[member.name].losses]
    lines = [*result_lines(found), "", *agreement_lines(same)]
    if begun:
        from megatron.report.page import write_report
        from megatron.report.page.history import named_runs

        page = suite.folder / "report.html"
        write_report(named_runs([str(each) for each in begun[:CURVES]]), page, title=suite.name)
        lines.append(f"curves{f' of the first {CURVES} runs' if len(begun) > CURVES else ''}: {page}")
    print("\n".join(lines))
    return int(unlike)


def manifest(suite: Suite, options: argparse.Namespace) -> int:
    from megatron.config.source.resolved_file import config_hash
    from megatron.suite.tables import agreements, plan_document, results

    resolved, states = suite.resolved(), _states(suite)
    document = plan_document(suite, resolved, states)
    for member in suite.members:
        state, entry = states[member.name], document["members"][member.name]
        entry |= {"configuration": config_hash(resolved[member.name].config), "loss": state.loss}
        entry |= {"validation": dict(state.validation), "tasks": dict(state.tasks)}
        entry["batches"] = [state.batches.get(step) for step in range(member.first, state.step)]
        folder = Path(resolved[member.name].config.checkpoint.dir)
        entry["checkpoints"] = sorted(path.name for path in folder.glob("step_*")) if folder.is_dir() else []
    same = agreements(suite, resolved, states)
    document["same_batches"] = {name: each.unlike is None for name, each in same.items()}
    document["results"] = results(suite, states)
    print(json.dumps(document, indent=2))
    return int(not all(document["same_batches"].values()))


def fit(suite: Suite | Path, options: argparse.Namespace) -> int:
    from megatron.suite.scaling.points import points_of, read_points, write_points
    from megatron.suite.scaling.study import save_study, study, study_lines

    if isinstance(suite, Path):
        points, folder, name = read_points(suite), suite.parent, suite.stem
        picture = _picture(options, folder, name)
    else:
        counted = not options.without_embeddings
        points = points_of(suite, suite.resolved(), options.points, options.validation, embeddings=counted)
        folder, name = suite.folder, suite.name
        picture = _picture(options, folder, name)
        write_points(points, folder / "points.csv")
    found = study(points, resamples=options.resamples)
    with writing(picture, "--picture"):
        save_study(found, picture, f"{name}: {len(points)} losses of {len(points.names)} runs")
    print(json.dumps(found.document(), indent=2) if options.json else "\n".join([*study_lines(found), str(picture)]))
    return 0


def chained(chain: Chain, options: argparse.Namespace) -> int:
    """A verb of a file with stages."""
    if options.verb in ("compare", "fit") or options.slurm or options.index is not None or options.jobs != 1:
        raise UserError(f"{chain.path} has stages: use plan, launch, status or manifest, one stage at a time")
    states = {stage.name: chain.state(stage) for stage in chain.stages}
    if options.verb == "launch":
        return int(chain.launch(lambda line: print(line, flush=True)) is not None)
    if options.verb == "plan":
        chain.check()
    if options.verb == "manifest":
        found = {
            each.name: json.loads(each.manifest.read_text()) for each in chain.stages if states[each.name] == "done"
        }
        print(json.dumps(found, indent=2))
    elif options.json:
        print(json.dumps(states, indent=2))
    else:
        for stage in chain.stages:
            parents = f"  from {', '.join(stage.parents)}" if stage.parents else ""
            print(f"{stage.name:<12} {states[stage.name]:<8} {stage.words[0]}{parents}")
    return 0


def _picture(options: argparse.Namespace, folder: Path, name: str) -> Path:
    picture: Path = options.picture or folder / f"{name}-scaling.png"
    keep_inputs([picture], [options.suite], "--picture")
    return picture


def _states(suite: Suite) -> dict:
    from megatron.suite.members import state_of

    try:
        return {member.name: state_of(member) for member in suite.members}
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def _refuse(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with status 2 for invalid options and options that would be ignored."""
    read, what = {"suite", "verb"} | READ[options.verb], options.verb
    if options.verb == "launch":
        read -= {"jobs", "index"} if options.slurm else {"sbatch"}
        what = "launch --slurm" if options.slurm else "launch without --slurm"
    if options.verb == "fit" and options.suite.suffix == ".csv":
        read, what = read - {"points", "validation", "without_embeddings"}, "fit of a table"
    refuse_unread(parser, options, read, what)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if not 0 <= options.resamples <= MOST:
        parser.error(f"--resamples must be from 0 to {MOST:,}")


def main(arguments: list[str] | None = None) -> int:
    """Run a verb and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="the suite's file, or for fit a table of points (.csv)")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--json", action="store_true", help="plan, status, compare, fit: print one JSON document")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="launch: runs at a time (default: 1)")
    parser.add_argument("--index", type=int, metavar="K", help="launch: only the K-th run, counted from 0")
    parser.add_argument("--slurm", action="store_true", help="launch: write a job array for sbatch, a task per run")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="=OPTION", help="launch: an option of its tasks"
    )
    fitting = parser.add_argument_group("fit")
    fitting.add_argument(
        "--points",
        choices=("end", "constant"),
        default="end",
        help="the last loss of each run, of its branches where it has any (the default), or all at a constant rate",
    )
    fitting.add_argument("--validation", metavar="NAME", help="the validation set, where runs have several")
    fitting.add_argument("--without-embeddings", action="store_true", help="N without embedding and head")
    fitting.add_argument(
        "--resamples", type=int, default=1000, metavar="N", help="for intervals (default: %(default)s)"
    )
    fitting.add_argument("--picture", type=Path, help="default: NAME-scaling.png in the suite's folder")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] and words[0] in VERBS and words[1:2] and words[1] not in VERBS:  # VERB FILE, as other verbs have it
        words[:2] = words[1], words[0]
    options = parser.parse_args(words)
    _refuse(parser, options)
    try:
        if options.verb == "fit" and options.suite.suffix == ".csv":
            return fit(options.suite, options)
        if (chain := read_chain(options.suite)) is not None:
            return chained(chain, options)
        return globals()[options.verb](read_suite(options.suite), options)
    except (ConfigError, OutputError, UserError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))

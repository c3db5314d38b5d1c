#!/usr/bin/env python3
"""Show or predict the messages of a run's ranks in a step.

    deepy communication RUN [--step N] [--rank R] [--layers] [--json] [--output FILE.png] [--trace FILE.json]
                                      [--before OTHER_RUN]
    deepy communication a.yml ... [key.path=value ...] --ranks N [--rank R] [--layers] [--json]

The first needs a run with logging.communication=counts. It shows the last step, of all ranks together or of one. With
logging.communication=times it also shows times, writes a trace for Perfetto, compares them with the machine's curves
(--machine), and compares hidden messages with another run (--before). The second predicts a step of a configuration
without training (docs/communication.md).

Exit status 2: there is no such account, a file is damaged, or the configuration has a part without a formula.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.command.given_options import refuse_unread  # noqa: E402
from megatron.config import ConfigError, load, split_arguments  # noqa: E402
from megatron.config.file_access import OutputError, keep_inputs, writing  # noqa: E402
from megatron.config.problems import UserError  # noqa: E402
from megatron.parallel.layout.layout import AXES  # noqa: E402
from megatron.parallel.messages.curve import CostCurve, read_curves  # noqa: E402
from megatron.parallel.messages.traffic import Tally  # noqa: E402
from megatron.report.communication import FOLDER, RankAccount, read_accounts, readable_bytes, regular_calls, table  # noqa: E402
from megatron.report.message_times import StepTimes, TimedSteps, save_account, side_by_side  # noqa: E402  # noqa: E402
from megatron.report.message_trace import read_events, write_trace  # noqa: E402

FIELDS = ("phase", "group", "operation", "dtype")
MOST_RANKS = 1_000_000


def accounts_of(run: str, rank: int | None) -> dict[int, RankAccount]:
    """The accounts of a run, of all ranks or of one."""
    try:
        accounts = read_accounts(run)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    if rank is not None and rank not in accounts:
        raise UserError(f"{run} has accounts of ranks {', '.join(map(str, accounts))}, not of {rank}")
    return accounts if rank is None else {rank: accounts[rank]}


def of_run(run: str, chosen: dict[int, RankAccount], step: int | None) -> tuple[dict[str, Any], Tally, Tally | None]:
    """Facts, counts of a step, and its prediction (None if a rank has no prediction)."""
    try:
        last = min(each.end - 1 if each.end else each.steps[-1][0] for each in chosen.values())
        at = last if step is None else step
        counted = sum((each.at(at) for each in chosen.values()), Tally())
    except (ValueError, IndexError) as error:
        raise UserError(str(error) or f"{run} has no account of a step") from error
    facts: dict[str, Any] = {"run": run, "step": at, "ranks": sorted(chosen)}
    reasons = {each.facts["unpredicted"] for each in chosen.values() if "unpredicted" in each.facts}
    if reasons or not all("predicted" in each.facts for each in chosen.values()):
        return facts | {"unpredicted": "; ".join(sorted(reasons)) or "the run has written none"}, counted, None
    try:
        predicted = sum((each.expected(at) for each in chosen.values()), Tally())
        uneven, most = (
            sum((Tally.of_rows(each.facts.get(name, [])) for each in chosen.values()), Tally())
            for name in ("uneven", "most")
        )
        layouts = [each.facts.get("layout", {}) for each in chosen.values()]
        several = math.prod(int(layouts[0].get(axis, 1)) for axis in AXES)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{run} has no readable prediction: {error}") from error
    if len(uneven) and len(chosen) < several:
        facts["uneven"] = uneven.rows()
    if len(most):
        facts["most"] = most.rows()
    return facts, counted, predicted


def same(facts: dict[str, Any], counted: Tally, predicted: Tally) -> bool:
    """Whether counts equal the prediction. Bytes that are predicted only for all ranks together are not compared for
    some ranks. A prediction that is an upper bound has equal messages and at least the counted bytes."""
    uneven, most = ({call for call, *_ in Tally.of_rows(facts.get(name, []))} for name in ("uneven", "most"))
    given = [{call: count for call, *count in tally} for tally in (regular_calls(counted), predicted)]
    if any(given[0].get(call, (0, 0))[1] > given[1].get(call, (0, 0))[1] for call in most):
        return False
    both = [
        {call: (count[0], 0 if call in uneven | most else count[1]) for call, count in each.items()} for each in given
    ]
    return both[0] == both[1]


def of_configuration(sources: list[str], ranks: int, rank: int | None) -> tuple[dict[str, Any], Tally]:
    """Facts, and the predicted messages of a step."""
    from megatron.model.costs.exchanges import BY_DOCUMENTS, MOST
    from megatron.plan.candidate import on_device
    from megatron.plan.messages.predict import predict
    from megatron.training.exchange import report_traffic

    files, overrides = split_arguments(sources)
    config, total, most = load(files, overrides, ranks=ranks, check_inputs=False).config, Tally(), Tally()
    config = on_device(config, config.launch.device != "cpu")
    chosen = range(ranks) if rank is None else [rank]
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(f"--rank {rank} must be from 0 to {ranks - 1}")
    for each in chosen:
        try:
            found = predict(config, ranks, each)
        except ValueError as error:
            raise UserError(str(error)) from error
        total += found.step + found.routed.tally(report_traffic(config, found.layout, each))
        most += Tally((call, 0, 0) for call in found.calls(MOST, BY_DOCUMENTS))
    return {"ranks": list(chosen), **({"most": most.rows()} if len(most) else {})}, total


def rows(counted: Tally | None, predicted: Tally | None, fields: tuple[str, ...]) -> list[list[Any]]:
    """[fields ..., messages and bytes counted, messages and bytes predicted] of each kind of call."""
    both = [{} if each is None else each.by(*fields) for each in (counted, predicted)]
    keys = sorted({key for each in both for key in each})
    return [[*key, *both[0].get(key, (0, 0)), *both[1].get(key, (0, 0))] for key in keys]


def to_other_hosts(accounts: dict[int, RankAccount], step: int) -> Tally | None:
    """Messages of a step from these ranks to other hosts. None if the run had one host, or has no record."""
    found = sum((each.to_other_hosts(step) for each in accounts.values()), Tally())
    return found if len(found) else None


def show(
    facts: dict[str, Any],
    counted: Tally | None,
    predicted: Tally | None,
    fields: tuple[str, ...],
    crossing: Tally | None = None,
) -> str:
    """The table with notes."""
    found = rows(counted, predicted, fields)
    crossed = {} if crossing is None else crossing.by(*fields)
    names, n = [{"dtype": "type"}.get(each, each) for each in fields], len(fields)
    lines = []
    for row in found:
        line = [each or "-" for each in row[:n]]
        if counted is not None:
            line += [row[n], readable_bytes(row[n + 1])]
        if crossing is not None:
            line.append(readable_bytes(crossed[key][1]) if (key := tuple(row[:n])) in crossed else "-")
        if predicted is not None:
            line += [row[n + 2], readable_bytes(row[n + 3])]
        if counted is not None and predicted is not None:
            different = row[n : n + 2] != row[n + 2 :] and row[0] != "look"
            line.append(f"differs by {row[n + 1] - row[n + 3]:+,} bytes" if different else "")
        lines.append(line)
    for title, given in (("counted", counted), ("predicted", predicted)):
        if given is not None:
            names += ["messages", title]
            names += ["to other hosts"] if title == "counted" and crossing is not None else []
    names += [""] if counted is not None and predicted is not None else []
    text = table(names, lines)
    if crossing is not None:
        text += f"\nto other hosts: {readable_bytes(sum(size for *_, size in crossing))}"
    if "unpredicted" in facts:
        text += f"\nno prediction: {facts['unpredicted']}"
    elif counted is not None and predicted is not None:
        text += "\ncounted and predicted " + ("are equal" if same(facts, counted, predicted) else "differ")
        if "uneven" in facts:
            text += ". Traffic of experts depends on the tokens, so its bytes are right only for all ranks together"
    if "most" in facts and predicted is not None:
        what = sorted({f"{call.operation} of {call.group}" for call, *_ in Tally.of_rows(facts["most"])})
        text += f"\nthe data decide of {', '.join(what)}: predicted is the most that there can be"
    return text


def curves_of(path: str | None) -> tuple[CostCurve, ...]:
    """The measured collectives of a machine, none without a file."""
    try:
        return read_curves(path) if path else ()
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def write_step(run: str, path: str, step: int | None) -> list[int]:
    """Write the individual messages of a run's last timed steps, or of one of them, as a trace. Return these steps."""
    try:
        steps = read_events(run)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    if step is not None and step not in steps:
        raise UserError(f"{run} has the single messages of steps {', '.join(map(str, steps))}, not of {step}")
    chosen = steps if step is None else {step: steps[step]}
    keep_inputs([path], list(Path(run, FOLDER).glob("*")))
    with writing(path, "--trace", folders=True):
        write_trace(path, chosen)
    return list(chosen)


def timed_steps(run: str, accounts: dict[int, RankAccount]) -> TimedSteps:
    """Hidden and exposed times of a run's messages."""
    try:
        return TimedSteps.of(run, accounts)
    except ValueError as error:
        raise UserError(str(error)) from error


def read_options(arguments: list[str] | None) -> tuple[argparse.Namespace, str | None]:
    """The options, and the run's folder (None for a configuration)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="RUN", help="a run's folder, or files and overrides")
    parser.add_argument("--step", type=int, help="step of the run (default: the last)")
    parser.add_argument("--rank", type=int, help="one rank (default: the sum over all)")
    parser.add_argument("--ranks", type=int, help="of the configuration")
    parser.add_argument("--layers", action="store_true", help="list each layer by itself")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output", help="draw the step of a run into this PNG file")
    parser.add_argument("--machine", metavar="FILE", help="machine.yml of `deepy bench communication`, to compare")
    traced = "write the run's last timed steps for Perfetto or Chrome, into a folder as a file for each rank"
    parser.add_argument("--trace", metavar="FILE", help=traced)
    parser.add_argument(
        "--before", metavar="OTHER_RUN", help="show hidden and exposed messages of that run and of this one"
    )
    options = parser.parse_intermixed_args(arguments)
    run = options.sources[0] if len(options.sources) == 1 and Path(options.sources[0]).is_dir() else None
    if run is None and options.ranks is None:
        parser.error(f"{options.sources[0]} is no run's folder, and a configuration needs --ranks N")
    shown = {"sources", "rank", "layers", "json"}
    if run is None:
        refuse_unread(parser, options, shown | {"ranks"}, "a prediction")
        if not 1 <= options.ranks <= MOST_RANKS:
            parser.error(f"--ranks must be from 1 to {MOST_RANKS:,}")
    else:
        refuse_unread(parser, options, shown | {"step", "output", "machine", "trace", "before"}, "the account of a run")
    return options, run


def main(arguments: list[str] | None = None) -> int:
    """Show the account and return the exit status."""
    options, run = read_options(arguments)
    fields = (*FIELDS[:1], "layer", *FIELDS[1:]) if options.layers else FIELDS
    counted: Tally | None = None
    predicted: Tally | None
    times = crossing = both = None
    try:
        if run is None:
            facts, predicted = of_configuration(options.sources, options.ranks, options.rank)
        else:
            accounts = accounts_of(run, options.rank)
            facts, counted, predicted = of_run(run, accounts, options.step)
            crossing = to_other_hosts(accounts, facts["step"])
            times = StepTimes.of(accounts, options.step, curves_of(options.machine))
            if options.before:
                both = [timed_steps(each, accounts_of(each, options.rank)) for each in (options.before, run)]
                facts["before"], facts["after"] = (each.facts() for each in both)
            if options.output:
                keep_inputs([options.output], list(Path(run, FOLDER).glob("*")))
                with writing(options.output):
                    title = f"communication of step {facts['step']}"
                    save_account(options.output, counted, predicted, times, title)
                facts["picture"] = options.output
            if options.trace:
                facts |= {"trace": options.trace, "trace_steps": write_step(run, options.trace, options.step)}
    except (ConfigError, OutputError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        keys = (*fields, "messages", "bytes", "predicted_messages", "predicted_bytes")
        found = [dict(zip(keys, row)) for row in rows(counted, predicted, fields)]
        crossed = {} if crossing is None else crossing.by(*fields)
        for entry in found if crossing is not None else ():
            entry["to_other_hosts"] = crossed.get(tuple(entry[field] for field in fields), (0, 0))[1]
        equal = None if counted is None or predicted is None else same(facts, counted, predicted)
        facts |= {"equal": equal, "calls": found, **({"times": times.facts()} if times else {})}
        print(json.dumps(facts))
        return 0
    print(show(facts, counted, predicted, fields, crossing))
    if times is not None:
        print(f"\n{times.text()}")
    if both is not None:
        print(f"\n{side_by_side(*both)}")
    for what in ("picture", "trace"):
        if what in facts:
            print(f"{what}: {facts[what]}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))

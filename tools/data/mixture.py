#!/usr/bin/env python
"""Show weights of a blend, and the tokens of each source that a run plans to read and has read.

    deepy data mixture show runs/my
    deepy data mixture weigh web=data/web books=data/books --tokens 2e9 --temperature 2

`show` lists tokens by source over the steps of a run. `weigh` prints data.train of a configuration. `propose` writes a
suite of tiny runs with random weights for `deepy suite`, and `fit` finds the best weights from their validation losses.
Both are RegMix's method (docs/curation.md).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
from pathlib import Path  # noqa: E402

from megatron.command.given_options import refuse_unread  # noqa: E402
from tools.data.command import run_left_out, run_tool  # noqa: E402

READ = {  # options of each verb
    "show": {"points"},
    "weigh": {"tokens", "temperature", "cap", "budget"},
    "propose": {"temperature", "count", "seed", "base", "output"},
    "fit": {"seed", "validation"},
}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["show", "weigh", "propose", "fit"])
    parser.add_argument("given", nargs="+", metavar="RUN|NAME=PREFIX|SUITE", help="a run, sources, or a suite")
    parser.add_argument("--points", type=int, default=10, metavar="N", help="show: steps (default: %(default)s)")
    parser.add_argument("--tokens", type=float, metavar="N", help="weigh: tokens that the run reads (default: all)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="weigh, propose: shares are size ** (1 / T). inf: equal shares, UniMax's with --cap (default: 1)",
    )
    parser.add_argument("--cap", type=float, metavar="EPOCHS", help="weigh: largest number of epochs of a source")
    parser.add_argument(
        "--budget", nargs="+", default=[], metavar="NAME=TOKENS", help="weigh: sources with fixed tokens"
    )
    parser.add_argument("--count", type=int, default=32, metavar="N", help="propose: runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="propose, fit: of the random mixtures (default: 0)")
    parser.add_argument("--base", metavar="FILE", help="propose: configuration of the tiny runs")
    parser.add_argument("--output", metavar="FILE", help="propose: the suite to write")
    parser.add_argument("--validation", metavar="NAME", help="fit: the set whose loss counts (default: the only one)")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.data.errors import DataError

    refuse_unread(options(), given, READ[given.verb] | {"verb", "given", "json"}, given.verb)
    if given.verb in ("show", "fit") and len(given.given) > 1:
        raise DataError(given.verb, f"it takes one name, not {len(given.given)}", "run it once for each")
    numbers = {"points": given.points, "tokens": given.tokens, "temperature": given.temperature, "cap": given.cap}
    for name, value in (numbers | {"count": given.count, "seed": given.seed + 1}).items():
        if value is not None and not (0 < value < 1e30 or (name == "temperature" and value == math.inf)):
            raise DataError(
                f"--{name}", f"it must be a number {'of at least' if name == 'seed' else 'above'} 0", "give one"
            )
    return {"show": over_time, "weigh": weigh, "propose": propose, "fit": fit}[given.verb](given)


def over_time(given: argparse.Namespace) -> dict:
    from megatron.data.errors import DataError
    from megatron.data.plan import SamplePlan
    from megatron.data.provenance import Provenance, config_file, run_config
    from megatron.report.ledger import batch_hashes
    from megatron.suite.mixture import over_time

    config = run_config(given.given[0])
    provenance = Provenance(config, left_out=run_left_out(given.given[0]))
    if not isinstance(provenance.plan, SamplePlan):
        raise DataError("data.synthetic", "this run makes its data, so it has no sources", "name another run")
    ledger = config_file(given.given[0]).with_name("ledger.jsonl")
    read = max(batch_hashes(ledger), default=-1) + 1 if ledger.is_file() else 0
    sources = [each.name for each in provenance.plan.sources]
    points = over_time(provenance.plan, read, provenance.left_out, given.points)
    return {"run": given.given[0], "steps": provenance.plan.steps, "read": read, "sources": sources, "points": points}


def _named(texts: list[str], what: str) -> dict[str, str]:
    from megatron.data.errors import DataError

    found = dict(each.partition("=")[::2] for each in texts)
    if len(found) < len(texts) or not all(name and value for name, value in found.items()):
        raise DataError(what, f"{' '.join(texts)} must be different names with values", "write them as in web=data/web")
    return found


def _sizes(texts: list[str]) -> tuple[dict[str, str], dict[str, float]]:
    """Prefixes and numbers of tokens of sources."""
    from megatron.data.errors import DataError
    from megatron.data.token_file import TokenFile

    paths = _named(texts, "sources")
    sizes = {name: float(TokenFile(path).tokens) for name, path in paths.items()}
    if empty := [name for name, size in sizes.items() if not size]:
        raise DataError(paths[empty[0]], "it has no tokens, so no weight can be given to it", "name other files")
    return paths, sizes


def weigh(given: argparse.Namespace) -> dict:
    from megatron.data.errors import DataError
    from megatron.suite.mixture import shares

    paths, sizes = _sizes(given.given)
    try:
        budgets = {name: float(value) for name, value in _named(given.budget, "--budget").items()}
    except ValueError as error:
        raise DataError("--budget", f"{error}", "write it as in books=2e9") from error
    tokens = given.tokens if given.tokens is not None else sum(sizes.values())
    if not budgets.keys() <= sizes.keys() or not all(0 < each < 1e30 for each in budgets.values()):
        raise DataError("--budget", f"budgets must be numbers of {', '.join(sizes)}", "write them as in books=2e9")
    found = shares(sizes, tokens, given.temperature, given.cap, budgets)
    train = [{"path": paths[name], "name": name, "weight": found[name]} for name in sizes if found[name]]
    rows = {
        name: {"size": sizes[name], "share": share, "tokens": share * tokens, "epochs": share * tokens / sizes[name]}
        for name, share in ((name, found[name]) for name in sizes)
    }
    return {"sources": rows, "train": train}


def propose(given: argparse.Namespace) -> dict:
    from megatron.config.file_access import writing
    from megatron.data.errors import DataError
    from megatron.suite.mixture import proposals, shares

    if not given.base or not given.output:
        raise DataError("--base, --output", "a suite must have a base and a file", "give both")
    paths, sizes = _sizes(given.given)
    prior = shares(sizes, sum(sizes.values()), given.temperature)
    rows = proposals(list(prior.values()), given.count, given.seed)
    width = len(str(given.count - 1))
    axis = {
        f"m{number:0{width}d}": {
            "data.train": [
                {"path": os.path.abspath(paths[name]), "name": name, "weight": round(float(weight), 4)}
                for name, weight in zip(sizes, row)
                if weight
            ]
        }
        for number, row in enumerate(rows)
    }
    base = os.path.abspath(given.base) if Path(given.base).exists() else given.base
    lines = [f"# Random mixtures around {json.dumps(prior)}, seed {given.seed}.", f"files: {json.dumps([base])}"]
    lines += ["axes:", "  mixture:", *(f"    {name}: {json.dumps(value)}" for name, value in axis.items())]
    with writing(given.output):
        Path(given.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"output": given.output, "mixtures": len(rows)}


def fit(given: argparse.Namespace) -> dict:
    import numpy as np

    from megatron.data.errors import DataError
    from megatron.suite.members import read_suite, state_of
    from megatron.suite.mixture import Regression

    suite = read_suite(Path(given.given[0]))
    resolved, runs = suite.resolved(), []
    for member in suite.members:
        state = state_of(member)
        if state.word == "finished" and state.validation:
            runs.append((
                {each.name: each.weight for each in resolved[member.name].config.data.train},
                state.validation,
            ))
    known = sorted(set.intersection(*(set(losses) for _, losses in runs))) if runs else []
    name = given.validation or (known[0] if len(known) == 1 else None)
    if name not in known:
        have = f"the finished runs have {', '.join(known) or 'none'}"
        raise DataError("--validation", f"it must name a validation set of all runs, and {have}", "name one, or train")
    runs = [run for run in runs if math.isfinite(run[1][name])]  # a run that diverged has no loss to fit
    names = sorted({source for weights, _ in runs for source in weights})
    table = np.array([[weights.get(source, 0.0) for source in names] for weights, _ in runs]).reshape(-1, len(names))
    table /= table.sum(axis=1, keepdims=True)
    losses = np.array([each[name] for _, each in runs])
    found = Regression.of(table, losses, given.seed)
    best = found.best(table.mean(axis=0), given.seed)
    return {
        "runs": len(runs),
        "validation": name,
        "held_out_rank_correlation": found.held_out,
        "best_run": {"loss": float(losses.min()), "weights": dict(zip(names, table[losses.argmin()].tolist()))},
        "predicted": {"loss": float(found.predict(best)), "weights": dict(zip(names, best.tolist()))},
    }


def show(result: dict) -> None:
    if "points" in result:
        print(f"{'before step':>12} {'':8}" + "".join(f"{each:>18}" for each in result["sources"]))
        for point in result["points"]:
            total = max(sum(point["tokens"].values()), 1)
            cells = (f"{count:,} {count / total:4.0%}" for count in point["tokens"].values())
            print(
                f"{point['step']:>12,} {'read' if point['read'] else 'planned':8}"
                + "".join(f"{each:>18}" for each in cells)
            )
    elif "train" in result:
        for name, row in result["sources"].items():
            print(f"# {name:16} {row['share']:8.4f} {row['tokens']:20,.0f} tokens {row['epochs']:8.3f} epochs")
        print("data:\n  train:")
        for each in result["train"]:
            print(f"    - {json.dumps(each)}")
    elif "mixtures" in result:
        print(f"{result['mixtures']} mixtures: train them with deepy suite {result['output']} launch")
    else:
        print(f"{result['runs']} runs, rank correlation on held-out runs {result['held_out_rank_correlation']:.3f}")
        for what in ("best_run", "predicted"):
            weights = ", ".join(f"{name} {value:.3f}" for name, value in result[what]["weights"].items())
            print(f"{what.replace('_', ' '):10} {result['validation']} loss {result[what]['loss']:.4f}: {weights}")
        if result["held_out_rank_correlation"] < 0.5:
            print("the prediction does not order runs that it has not seen: do not use it")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))

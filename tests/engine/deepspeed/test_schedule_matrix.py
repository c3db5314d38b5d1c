"""Every schedule of a pipeline, with each number of stages, on each family of layers, at each ZeRO stage.

Losses, gradient norms, an evaluation and final weights equal one process of plain PyTorch. They also equal DeepSpeed's
engine where that can run (1F1B at ZeRO 0 and 1). Updates are proportional to gradients. Two replicas share the states.

    python -m tests.engine.deepspeed.test_schedule_matrix 2:dense 4:dense ... > rows.json  # the slow runs of some cases
    python -m tests.engine.deepspeed.test_schedule_matrix table rows.json ...  # the table of docs/pipelines.md
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.config.arithmetic.pipelines import one_forward_one_backward
from megatron.config.variants import overlay
from tests.training import runs
from tests.training.layouts.layout_check import check
from tests.training.matrix import Bounds, Case, read
from tests.workers import run

TABLE = "1f1b as a file"
SCHEDULES = [  # with their stages per rank
    ("1f1b", 1),
    (TABLE, 1),
    ("asynchronous", 1),
    ("zb_h1", 1),
    ("interleaved", 2),
    ("zb_h1", 2),
    ("zbv", 2),
    ("dualpipe_v", 2),
    ("interleaved", 3),
    ("zb_h1", 3),
]
FAMILIES = {  # name: an architecture of tests/layouts.yml, and its blocks before and after the repeated one
    "dense": ("gpt2", "", "attention/mlp", ""),
    "experts": ("moe", "attention/mlp ", "attention/moe", ""),
    "Mamba-2": ("zamba2", "", "mamba2/mlp", ""),
    "RWKV-7": ("rwkv7", "", "rwkv7/rwkv7_ffn", ""),
    "shared blocks": ("zamba2", "", "mamba2+shared_attention", " mamba2+shared_attention/mlp"),
}


class Run(NamedTuple):
    schedule: str
    each: int  # stages per rank
    zero: int

    @property
    def stages(self) -> tuple[int, bool]:
        """Schedules with the same stages on the same ranks add in the same order."""
        return self.each, self.schedule in ("zbv", "dualpipe_v")


def product() -> list[Run]:
    """DeepSpeed's runs come first. At ZeRO 2 and 3 1F1B is a table in any case."""
    made = [Run(schedule, each, zero) for schedule, each in SCHEDULES for zero in range(4)]
    return [it for it in made if it.zero < 2 or it.schedule not in (TABLE, "asynchronous")]


def case_of(pipeline: int, family: str, it: Run, folder: Path) -> Case:
    """Three blocks per rank, so that each number of stages has the same reference."""
    matrix = read()
    recipe = matrix["recipes"]["fp32"]
    architecture, first, block, last = FAMILIES[family]
    ends = bool(first) + bool(last)
    layers = f"{first}({block}) x{3 * pipeline - ends}{last}"
    plain = overlay(overlay(matrix["common"], matrix["architectures"][architecture]), recipe["values"])
    training = {"sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 4 * pipeline}
    plain = overlay(plain, {"model": {"layers": layers}, "training": training})
    plain.pop("about", None)
    plain.pop("apart", None)
    schedule = it.schedule
    if schedule == TABLE:
        file = folder / f"{pipeline}.csv"
        table = one_forward_one_backward(pipeline, 2 * pipeline)
        file.write_text("\n".join(",".join(map(str, own)) for own in table))
        schedule = str(file)
    parallel = {"pipeline": pipeline, "schedule": schedule, "stages_per_rank": it.each}
    values = overlay(plain, {"parallel": parallel, "zero": {"stage": it.zero}})
    bounds = Bounds(**recipe["bounds"])
    return Case("fp32", family, str(it), 2 * pipeline, values, plain, bounds)


def bits(results: list[tuple]) -> list:
    return [(*each[:3], [(one[0].name, one[-1].tobytes()) for one in each[3]]) for each in results]


def compare(pipeline: int, family: str, chosen: list[Run], folder: Path) -> dict[str, Any]:
    """Train all, and compare each with one process. At ZeRO 0 and 1, schedules with the same stages have equal bits,
    and with one stage per rank the bits of DeepSpeed. Where stages of a rank share blocks, sums differ by rounding.

    Returns:
        The row of the table.
    """
    worst, first, alike = {"loss": 0.0, "norm": 0.0, "weights": 0.0}, dict[tuple, list](), 0
    for it in chosen:
        case = case_of(pipeline, family, it, folder)
        results = run(case.ranks, runs.train, case.values, case.ranks)
        worst = {name: max(worst[name], error) for name, error in check(case, results).items()}
        if it.zero > 1 or (it.each > 1 and family == "shared blocks"):
            continue
        found = bits(results)
        expected = first.setdefault((it.stages, it.zero), found)
        assert found == expected, f"{it} has other bits"
        alike += expected is not found
    return {"family": family, "ranks": pipeline, "runs": len(chosen), "alike": alike, **worst}


SHORT = [Run("zb_h1", 3, 2), Run("interleaved", 2, 3), Run("dualpipe_v", 2, 0), Run("asynchronous", 1, 1)]


def test_some_schedules(tmp_path: Path):
    """One of each form, one at each ZeRO stage. tests/layouts.yml has more, and the other test all."""
    compare(2, "RWKV-7", SHORT, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pipeline", [2, 4])
def test_all_schedules(pipeline: int, family: str, tmp_path: Path):
    compare(pipeline, family, product(), tmp_path)


def table(rows: list[dict[str, Any]]) -> str:
    names = ("layers", "ranks of the pipeline", "runs", "equal bits", "losses", "norms of gradients", "final weights")
    lines = [names, ["---"] * len(names)]
    for row in sorted(rows, key=lambda row: (row["ranks"], list(FAMILIES).index(row["family"]))):
        errors = (f"{row[name]:.0e}" for name in ("loss", "norm", "weights"))
        lines.append([row["family"], str(row["ranks"]), str(row["runs"]), str(row["alike"]), *errors])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        print(table([json.loads(line) for file in sys.argv[2:] for line in Path(file).read_text().splitlines()]))
    else:
        for named in sys.argv[1:]:
            ranks, _, which = named.partition(":")
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(compare(int(ranks), which, product(), Path(folder))), flush=True)

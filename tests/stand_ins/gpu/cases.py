"""The runs whose steps are counted on the stand-in of a GPU.

make gpu-host                                        compares them with counts.json
python -m tests.stand_ins.gpu.cases --write [CASE]   counts them again
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.paths import ROOT

TABLE = Path(__file__).with_name("counts.json")
STEP = ["training.micro_batch_size=2", "training.compile=off"]
TWO, FOUR = ["training.global_batch_size=4"], ["training.global_batch_size=8"]  # micro-batches on one data rank
EIGHT = ["training.global_batch_size=64"]  # four micro-batches on eight ranks
CASES = {
    "llama, bf16, ZeRO 1": (1, "llama", ["configs/layouts/bf16.yml", *FOUR]),
    "llama, bf16, ZeRO 1, two micro-batches": (1, "llama", ["configs/layouts/bf16.yml", *TWO]),
    "llama, fp32": (1, "llama", FOUR),
    "experts, bf16, ZeRO 1": (1, "moe", ["configs/layouts/bf16.yml", *FOUR]),
    "mamba2, bf16, ZeRO 1": (1, "mamba2", ["configs/layouts/bf16.yml", "model.kernels=torch", *FOUR]),
    "llama, bf16, ZeRO 1, dp8": (8, "llama", ["configs/layouts/bf16.yml", *EIGHT]),
    "llama, bf16, ZeRO 2, dp8": (8, "llama", ["configs/layouts/bf16.yml", "zero.stage=2", *EIGHT]),
    "llama, bf16, ZeRO 3, dp8": (8, "llama", ["configs/layouts/bf16.yml", "zero.stage=3", *EIGHT]),
    "llama, bf16, ZeRO 1, spikes are skipped": (1, "llama", ["configs/layouts/bf16.yml", "spikes.action=skip", *FOUR]),
    "llama, bf16, ZeRO 1, dp8, spikes are skipped": (
        8,
        "llama",
        ["configs/layouts/bf16.yml", "spikes.action=skip", *EIGHT],
    ),
    "llama, bf16, ZeRO 2, dp8, spikes are clipped": (
        8,
        "llama",
        ["configs/layouts/bf16.yml", "zero.stage=2", "spikes.action=clip", *EIGHT],
    ),
    "llama, bf16, ZeRO 2, offloaded optimizer": (
        1,
        "llama",
        ["configs/layouts/bf16.yml", "zero.stage=2", "zero.offload_optimizer.device=cpu", *FOUR],
    ),
    "llama, bf16, tp2 pp2 dp4": (
        16,
        "llama",
        ["configs/layouts/bf16.yml", "parallel.tensor=2", "parallel.pipeline=2", "training.global_batch_size=32"],
    ),
}


def counts(names: Iterable[str], environment: dict[str, str]) -> dict[str, dict]:
    """What the start of each case and one of its steps ask of the device."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for number, (ranks, model, arguments) in enumerate(CASES[name] for name in names):
            own = [f"configs/test/tiny_{model}.yml", *(each for each in arguments if each.endswith(".yml"))]
            own += [*STEP, *(each for each in arguments if "=" in each)]
            jobs.append((str(Path(folder) / f"{number}.json"), ranks, own))
        run_all(Path(folder), jobs, environment)
        return {name: found(output) for name, (output, *_) in zip(names, jobs)}


def run_all(folder: Path, jobs: list[tuple[str, int, list[str]]], environment: dict[str, str]) -> None:
    """Count runs of (output, ranks, arguments), one after another, from one process that has imported torch."""
    todo = folder / "all.jobs"
    todo.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.stand_ins.gpu.program", str(todo)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True)


def found(output: str) -> dict:
    """The counts of a run.

    Raises:
        RuntimeError: it failed, with the end of its log.
    """
    if not Path(output).exists():
        raise RuntimeError(Path(f"{output}.log").read_text()[-3000:])
    return json.loads(Path(output).read_text())


def row(found: dict) -> dict:
    """What the table keeps of a case."""
    kept = ("kernels", "waits", "pageable", "pinned", "collectives")
    return {"groups": found["start"]["groups"], **{name: found["step"][name] for name in kept}}


def main() -> None:
    from .build import build

    wanted = sys.argv[2:] or list(CASES)
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, found in counts(wanted, build(Path(folder))).items():
            table[name] = row(found)
            print(name, sum(table[name]["waits"].values()), "waits", table[name]["kernels"], "kernels", flush=True)
    TABLE.write_text(json.dumps({each: table[each] for each in CASES if each in table}, indent=1) + "\n")


if __name__ == "__main__":
    main()

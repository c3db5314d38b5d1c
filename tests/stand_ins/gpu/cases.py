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
    "llama, bf16, ZeRO 3, offloaded optimizer, dp2": (
        2,
        "llama",
        [
            "configs/layouts/bf16.yml",
            "zero.stage=3",
            "zero.offload_optimizer={device: cpu, pin_memory: true}",
            "training.global_batch_size=8",
        ],
    ),
    "experts with a capacity, bf16, dp2 ep2": (
        2,
        "moe",
        ["configs/layouts/bf16.yml", "parallel.expert=2", "model.moe.capacity_factor=1.0", *FOUR],
    ),
    "llama, bf16, tp2 pp2 dp4": (
        16,
        "llama",
        ["configs/layouts/bf16.yml", "parallel.tensor=2", "parallel.pipeline=2", "training.global_batch_size=32"],
    ),
}
FLA, DOCUMENTS = (
    ["configs/layouts/bf16.yml", "model.kernels=fla", *TWO],
    ["data.reset_attention_at_eod=true", "tokenizer.eod_id=0"],
)
CASES |= {
    "mamba2, bf16, kernels of fla": (1, "mamba2", FLA),
    "mamba2, bf16, kernels of fla, documents": (1, "mamba2", [*FLA, *DOCUMENTS]),
    "rwkv7, bf16, kernels of fla": (1, "rwkv7", [*FLA, "model.rwkv7.head_dim=16"]),
    "rwkv7, bf16, kernels of fla, documents": (1, "rwkv7", [*FLA, *DOCUMENTS, "model.rwkv7.head_dim=16"]),
    "gated delta, bf16, kernels of fla": (1, "gated_delta", [*FLA, "model.gated_delta={key_dim: 16, value_dim: 16}"]),
}
# Compiled layers at the widths of models: a pattern, and what differs from a small model.
WIDE = {
    "Pythia": ("neox", "(attention/mlp)", ["model.hidden_size=2048", "model.attention.heads=16"]),
    "Llama": (
        "llama",
        "(attention/mlp)",
        ["model.hidden_size=2048", "model.attention={heads: 32, kv_heads: 8}", "model.mlp.hidden_size=8192"],
    ),
    "experts": (
        "mixtral",
        "(attention/moe)",
        [
            "model.hidden_size=768",
            "model.attention={heads: 12, kv_heads: 12, head_dim: 64}",
            "model.moe.experts=8",
            "model.moe.hidden_size=2048",
        ],
    ),
    "Mamba-2": (
        "mamba2",
        "mamba2",
        [
            "model.hidden_size=1024",
            "model.mamba2={head_dim: 64, state_size: 128, groups: 1, chunk: 256}",
            "model.kernels=fla",
        ],
    ),
    "RWKV-7": (
        "rwkv7",
        "(rwkv7/rwkv7_ffn)",
        [
            "model.hidden_size=1024",
            "model.rwkv7={head_dim: 64, decay_rank: 64, rate_rank: 64, value_rank: 32, gate_rank: 128}",
            "model.kernels=fla",
        ],
    ),
}
TOKENS = 8192  # of a micro-batch


def wide(name: str, layers: int, passes: int = 1, chunk: int = 1024) -> str:
    """The name of the case of a compiled model: its layers and micro-batches, and tokens in a chunk of the loss."""
    return f"{name}, compiled, {layers} layers, {passes} micro-batches, loss of {chunk}"


def add_wide(name: str, layers: int, passes: int = 1, chunk: int = 1024) -> None:
    model, pattern, own = WIDE[name]
    size = ["training.micro_batch_size=4", f"training.sequence_length={TOKENS // 4}", "training.compile=auto"]
    size += [f"training.global_batch_size={4 * passes}", f"training.loss_chunk={chunk}"]
    arguments = ["configs/layouts/bf16.yml", *size, f"model.layers={pattern} x{layers}", *own]
    CASES[wide(name, layers, passes, chunk)] = 1, model, arguments


for each in WIDE:
    add_wide(each, 2)
    add_wide(each, 3)
add_wide("Pythia", 2, passes=2)
add_wide("Pythia", 2, chunk=TOKENS)


def kernels_of_layers() -> dict[str, int]:
    """Kernels of a compiled layer in a micro-batch, by the table."""
    table = json.loads(TABLE.read_text())
    return {name: table[wide(name, 3)]["kernels"] - table[wide(name, 2)]["kernels"] for name in WIDE}


def further_kernels() -> tuple[int, int, int]:
    """The other kernels of Pythia: of a step, of a micro-batch, and of a chunk of its loss."""
    names = wide("Pythia", 2), wide("Pythia", 2, passes=2), wide("Pythia", 2, chunk=TOKENS)
    one, two, whole = (json.loads(TABLE.read_text())[name]["kernels"] for name in names)
    chunks = TOKENS // 1024
    chunk = (one - whole) // (chunks - 1)
    micro_batch = two - one - 2 * kernels_of_layers()["Pythia"] - chunks * chunk
    return one - (two - one), micro_batch, chunk


def counts(names: Iterable[str], environment: dict[str, str]) -> dict[str, dict]:
    """Calls of the device in the start of each case and in one of its steps."""
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
    """The table's entry of a case."""
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

"""Draw the curves of a chain: `python examples/chain/picture.py runs/chain docs/chain.png`."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SEEDS = ("rl_1", "rl_2", "rl_3")


def series(folder: Path, *names: str) -> tuple[list[int], list[float]]:
    """Steps and values of a number in a run's metrics."""
    steps, values = [], []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in names:
            record = record.get(name) if isinstance(record, dict) else None
        if record is not None:
            steps.append(json.loads(line)["step"])
            values.append(record)
    return steps, values


def main(folder: Path, output: Path) -> None:
    _, axes = plt.subplots(1, 3, figsize=(12, 3.5), constrained_layout=True)
    for stage in ("pretrain", "midtrain", "sft"):
        axes[0].plot(*series(folder / stage, "loss"), label=stage)
    axes[0].set(title="loss", xlabel="step", ylabel="nats per label")
    axes[1].plot(*series(folder / "dpo", "preference_margin"), label="dpo")
    axes[1].set(title="preference margin", xlabel="step")
    for number, stage in enumerate(SEEDS, 1):
        steps, rewards = series(folder / stage, "held_out", "reward")
        axes[2].plot(steps, rewards, label=f"seed {number}")
        print(f"seed {number}: right answers to held-out problems {rewards[0]:.3f} -> {rewards[-1]:.3f}")
    axes[2].set(title="right answers, held-out problems", xlabel="step")
    for each in axes:
        each.legend()
    plt.savefig(output, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Reinforcement learning: `./deepy.py align.py a.yml b.yml key.path=value ...`. docs/reinforcement_learning.md."""

from megatron.worker.job import guarded, leave_process


def main() -> int:
    from megatron.training.run import train

    return train()


if __name__ == "__main__":
    leave_process(guarded(main))

"""Train a model: `./deepy.py train.py a.yml b.yml key.path=value ...` (or `python train.py a.yml` on one process)."""

import sys

from megatron.worker.job import guarded


def main() -> int:
    from megatron.training.run import train

    return train()


if __name__ == "__main__":
    sys.exit(guarded(main))

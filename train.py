"""Train a model: `./deepy.py train.py a.yml b.yml key.path=value ...` (or `python train.py a.yml` on one process)."""

from megatron.worker.job import guarded, leave_process


def main() -> int:
    from megatron.training.run import train

    return train()


if __name__ == "__main__":
    leave_process(guarded(main))

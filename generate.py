"""Text from a checkpoint: `python generate.py RUN_OR_CHECKPOINT --prompt "def main(" --tokens 100`."""

import sys

from megatron.worker.job import guarded, leave_process


def main() -> int:
    from megatron.training.text import main as generate

    return generate(sys.argv[1:])


if __name__ == "__main__":
    leave_process(guarded(main))

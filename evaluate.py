"""Score checkpoints on benchmark tasks: `./deepy.py evaluate.py a.yml --tasks arc_easy,lambada_openai`."""

import sys

from megatron.worker.job import guarded


def main() -> int:
    from eval_tasks.main import evaluate

    return evaluate()


if __name__ == "__main__":
    sys.exit(guarded(main))

"""Which training sequences a checkpoint can recite: `./deepy.py extract.py a.yml --steps 0:1000`."""

import sys

from megatron.worker.job import guarded


def main() -> int:
    from eval_tasks.memorisation.main import extract

    return extract()


if __name__ == "__main__":
    sys.exit(guarded(main))

"""Which training sequences a checkpoint can recite: `./deepy.py extract.py a.yml --steps 0:1000`."""

from megatron.worker.job import guarded, leave_process


def main() -> int:
    from megatron.evaluation.memorisation.main import extract

    return extract()


if __name__ == "__main__":
    leave_process(guarded(main))

"""Score checkpoints on benchmark tasks: `./deepy.py evaluate.py a.yml --tasks arc_easy,lambada_openai`."""

from megatron.worker.job import guarded, leave_process


def main() -> int:
    from megatron.evaluation.main import evaluate

    return evaluate()


if __name__ == "__main__":
    leave_process(guarded(main))

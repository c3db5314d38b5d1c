"""Sums to read, one per line of JSON: `python examples/arithmetic/texts.py > sums.jsonl`.

Most sums have a question mark in place of the answer, so a model that has only read them seldom answers. Problems of
evaluations are omitted.
"""

import json

from megatron.data.hashing import generator, key_of
from megatron.features.align.environments import addition, problem
from megatron.features.align.problems import HELD_OUT

PROBLEMS, UNANSWERED = 30_000, 0.6


def main() -> None:
    for number in range(PROBLEMS):
        found = problem(addition, (1, 2), 0, "text", number)
        if key_of(found["prompt"]) % HELD_OUT == 0:
            continue
        answer = "?" if generator(0, "answer", number).random() < UNANSWERED else found["answer"]
        print(json.dumps({"text": f"{found['prompt']}{answer}\n"}))


if __name__ == "__main__":
    main()

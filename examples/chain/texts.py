"""Texts of every stage of chain.yml: `python examples/chain/texts.py FOLDER [PROBLEMS]`.

All are sums of numbers with one or two digits. Some have a question mark in place of the answer, since no answer is
better than a wrong one. They are three of ten sums of the pretraining, and three of five chats and preferred answers.
No file but held_out.jsonl has a problem that evaluations ask.
"""

import json
import sys
from pathlib import Path

from megatron.data.hashing import generator, key_of
from megatron.features.align.environments import addition, problem
from megatron.features.align.problems import HELD_OUT

PROBLEMS, ASKED = 60_000, 512


def problems(kind: str, count: int, held_out: bool) -> list[dict]:
    """Different numbers of a kind have problems of their own. The set is decided by the problem."""
    found, number = [], 0
    while len(found) < count:
        own = problem(addition, (1, 2), 0, kind, number)
        if (key_of(own["prompt"]) % HELD_OUT == 0) == held_out:
            found.append(own)
        number += 1
    return found


def answers(kind: str, own: list[dict], unanswered: float) -> list[str]:
    """The right answer, or a question mark for a share of the problems."""
    return ["?" if generator(0, kind, n).random() < unanswered else p["answer"] for n, p in enumerate(own)]


def chat(own: dict, answer: str | None = None) -> list[dict]:
    asked = [{"role": "user", "content": own["prompt"].rstrip("=")}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


def main(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, records: list[dict]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))

    sums = problems("pretrain", count, False)
    chats, pairs = problems("chats", count // 10, False), problems("pairs", count // 10, False)
    write("sums", [{"text": f"{p['prompt']}{a}\n"} for p, a in zip(sums, answers("pretrain", sums, 0.3))])
    write("better", [{"text": f"{p['prompt']}{p['answer']}\n"} for p in problems("midtrain", count // 3, False)])
    write("chats", [{"messages": chat(p, a)} for p, a in zip(chats, answers("chats", chats, 0.6))])
    wrong = [str(int(p["answer"]) + int(generator(0, "wrong", n).integers(1, 10))) for n, p in enumerate(pairs)]
    better = answers("pairs", pairs, 0.6)
    write("pairs", [{"chosen": chat(p, a), "rejected": chat(p, no)} for p, a, no in zip(pairs, better, wrong)])
    for name, held_out, size in (("prompts", False, count // 5), ("held_out", True, min(ASKED, count))):
        asked = problems(name, size, held_out)
        write(name, [{"messages": chat(p), "question": p["prompt"].rstrip("="), "answer": p["answer"]} for p in asked])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else PROBLEMS)

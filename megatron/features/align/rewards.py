"""Rewards: functions (prompt, completion, record, options) -> a number. No torch here.

A reward is pure: the same arguments give the same number. A record is what the prompt's line of the file has, or what
an environment has made, such as `answer`. Rewards run in processes of their own (`verifier.py`), which may be killed.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from megatron.config.registry import load

from .options import MATH_VERIFY

Record = Mapping[str, Any]

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")


def exact(prompt: str, completion: str, record: Record, *, key: str = "answer", ignore_case: bool = False) -> float:
    """1 if the completion is the record's answer, up to white space at its ends."""
    given, wanted = completion.strip(), str(record[key]).strip()
    return float(given.lower() == wanted.lower() if ignore_case else given == wanted)


def number(prompt: str, completion: str, record: Record, *, key: str = "answer") -> float:
    """1 if the last number of the completion equals the record's. Commas between digits are ignored."""
    from decimal import Decimal

    found = NUMBER.findall(completion)
    return float(bool(found) and Decimal(found[-1].replace(",", "")) == Decimal(str(record[key]).replace(",", "")))


def math(prompt: str, completion: str, record: Record, *, key: str = "answer") -> float:
    """1 if math-verify finds the completion's answer equal to the record's, such as 1/2 and 0.5."""
    parse, verify = load(f"{MATH_VERIFY}:parse"), load(f"{MATH_VERIFY}:verify")
    answer = str(record[key])  # math-verify reads LaTeX in delimiters only, and data often have it without
    wanted = parse(answer if _DELIMITED.search(answer) else f"${answer}$")
    if not wanted:
        raise ValueError(f"math-verify finds no answer in the record's {answer[:100]!r}")
    return float(verify(wanted, parse(completion)))


def format(prompt: str, completion: str, record: Record, *, pattern: str) -> float:
    """1 if the whole completion matches a regular expression, in which `.` is any character."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def length(prompt: str, completion: str, record: Record, *, limit: int, buffer: int) -> float:
    """DAPO's soft punishment of long completions, in tokens: 0 up to limit - buffer, then down to -1 at the limit."""
    return max(-1.0, min(0.0, (limit - buffer - record["completion_tokens"]) / buffer))


def tests(
    prompt: str, completion: str, record: Record, *, key: str = "tests", seconds: float = 5.0, memory_mib: int = 1024
) -> float:
    """1 if the completion's program, followed by the record's tests, runs to its end in a sandbox.

    The program is the last block of code between lines of three backquotes, or the whole completion."""
    from .sandbox import run

    blocks = re.findall(r"```[^\n]*\n(.*?)```", completion, re.DOTALL)
    program = blocks[-1] if blocks else completion
    word = secrets.token_hex(16)  # a program that ends early does not print it
    done, output = run(f"{program}\n{record[key]}\nprint('\\n{word}')\n", seconds, memory_mib << 20)
    return float(done and output.rstrip().endswith(word))

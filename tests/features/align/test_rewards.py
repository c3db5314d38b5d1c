"""Rewards, their processes, and the sandbox of programs."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.config.problems import UserError
from megatron.features.align import environments, rewards
from megatron.features.align.sandbox import run
from megatron.features.align.verifier import Item, Verifier

BY_WORD = [{"type": "tests.features.align.judges:by_word", "weight": 2.0, "options": {}}]


def test_a_reward_that_misbehaves_costs_its_sample_only():
    verifier = Verifier(BY_WORD, 2, 1.0)
    words = ["good", "hang", "fair", "die", "raise", "leave", "none", "good"]
    begun = time.monotonic()
    found = verifier.judge([Item("", word, {}) for word in words])
    assert [each.reward for each in found] == [2.0, 0, 0.5, 0, 0, 0, 0, 2.0]
    reasons = [each.failure or "" for each in found]
    assert [reason[:22] for reason in reasons if reason] == [
        "no answer within 1 sec",
        "the process has ended ",
        "ValueError: no number",
        "SystemExit: 0",
        "ValueError: tests.feat",
    ]
    assert time.monotonic() - begun < 60
    verifier.close()
    again = Verifier(BY_WORD, 1, 1.0)
    again.judge([Item("", "good", {})])
    process = again.idle.get()
    again.idle.put(process)
    again.close()
    assert process is not None and process.ended


@pytest.mark.parametrize(
    "reward, others, rule",
    [
        ({"type": "tests.features.align.judges:nothing"}, [], "must have nothing"),
        ({"type": "tests.features.align.judges:digits", "options": {"limit": 1}}, [], "does not take .*'limit'"),
        ({"type": "length", "options": {"limit": 4}}, [], "length does not take .* missing .* 'buffer'"),
        ({"type": "length", "options": {"limit": 4, "buffer": 0}}, [], "division by zero"),
        ({"type": "format", "options": {"pattern": "("}}, [], "unterminated subpattern"),
        ({"type": "tests", "options": {"memory_mib": 1}}, [], "does not end with these seconds and memory_mib"),
        ({"type": "exact"}, ["tests.features.align.judges:nothing"], "must have nothing"),
    ],
)
def test_rewards_that_cannot_be_used_are_found_before_the_first(reward, others, rule):
    verifier = Verifier([{"weight": 1.0, "options": {}, **reward}], 1, 10.0)
    assert re.search(rule, verifier.fault(others) or "")
    if not others:
        with pytest.raises(UserError, match=rule):
            verifier.judge([Item("", "a", {})])
    verifier.close()


def test_a_process_that_reads_nothing_does_not_stop_the_run():
    """Its pipe is full long before the end of such a message."""
    verifier = Verifier(BY_WORD, 1, 1.0)
    assert verifier.fault() is None
    process = verifier.idle.get()
    assert process is not None
    os.kill(process.child.pid, signal.SIGSTOP)
    verifier.idle.put(process)
    found = verifier.judge([Item("", "good" * (1 << 20), {}), Item("", "good", {})])
    assert [each.failure for each in found] == ["no answer within 1 seconds", None]
    verifier.close()


def test_weighted_rewards_are_finite():
    verifier = Verifier([{**BY_WORD[0], "weight": 1e308}] * 2, 1, 10.0)
    (found,) = verifier.judge([Item("", "good", {})])
    assert found.reward == 0 and "must be finite" in (found.failure or "")
    verifier.close()


@pytest.mark.parametrize(
    "name, completion, record, options, wanted",
    [
        ("exact", " 12\n", {"answer": 12}, {}, 1),
        ("exact", "Paris", {"city": "paris"}, {"key": "city", "ignore_case": True}, 1),
        ("exact", "13", {"answer": "12"}, {}, 0),
        ("number", "so 3 + 4 = 1,007.0.", {"answer": "1007"}, {}, 1),
        ("number", "7 or 8", {"answer": 7}, {}, 0),
        ("number", "none", {"answer": 7}, {}, 0),
        ("format", "<think>a\nb</think>c", {}, {"pattern": "<think>.*</think>.+"}, 1),
        ("format", "<think>a", {}, {"pattern": "<think>.*</think>.+"}, 0),
        ("length", "", {"completion_tokens": 90}, {"limit": 100, "buffer": 20}, -0.5),
        ("length", "", {"completion_tokens": 80}, {"limit": 100, "buffer": 20}, 0),
        ("length", "", {"completion_tokens": 300}, {"limit": 100, "buffer": 20}, -1),
    ],
)
def test_shipped_rewards(name, completion, record, options, wanted):
    assert getattr(rewards, name)("", completion, record, **options) == wanted


def test_mathematical_answers():
    pytest.importorskip("math_verify")
    assert rewards.math("", r"so it is \boxed{\frac{1}{2}}", {"answer": "0.5"}) == 1
    assert rewards.math("", r"so it is \boxed{2}", {"answer": "0.5"}) == 0
    for answer in (r"\sqrt{2}", r"$\sqrt{2}$", r"\boxed{\sqrt{2}}"):
        assert rewards.math("", r"so it is \boxed{\sqrt{2}}", {"answer": answer}) == 1
    with pytest.raises(ValueError, match="finds no answer"):
        rewards.math("", "2", {"answer": ""})


def test_programs_are_judged_by_tests():
    record = {"tests": "assert double(4) == 8"}
    answer = "It is\n```python\ndef double(x):\n    return {}\n```\n"
    assert rewards.tests("", answer.format("2 * x"), record) == 1
    assert rewards.tests("", answer.format("3 * x"), record) == 0
    assert rewards.tests("", "import os\nos._exit(0)", record) == 0  # it ends before the tests


def test_programs_have_limits(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("a")
    harmless = "open('x', 'w').write('a')\nimport threading\nt = threading.Thread(target=print)\nt.start()\nt.join()"
    assert run(harmless, 10, 1 << 30)[0]
    mode = kept.stat().st_mode
    for program, reason in {
        "import socket; socket.socket()": "PermissionError",
        "import os; os.fork()": "PermissionError",
        "import os; os.kill(os.getppid(), 9)": "PermissionError",
        f"open({str(kept)!r}, 'w')": "PermissionError",
        f"import os; os.unlink({str(kept)!r})": "PermissionError",
        f"import os; os.truncate({str(kept)!r}, 0)": "PermissionError",
        f"import os; os.chmod({str(kept)!r}, 0)": "PermissionError",
        f"import os; os.rename({str(kept)!r}, 'mine')": "PermissionError",
        "import os; os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))": "PermissionError",
        "import ctypes, os; assert not ctypes.CDLL(None).sigqueue(os.getppid(), 0, 0)": "AssertionError",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], 8, os.getppid())": "PermissionError",  # F_SETOWN
        "import ctypes; assert not ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)": "AssertionError",  # PR_SET_PDEATHSIG
        "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0": "AssertionError",  # it would stay
        "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')": "PermissionError",
        "open(__file__).read()": "FileNotFoundError",  # the tests of the program
        "open('large', 'wb').write(bytes(1 << 25))": "File too large",
        "x = bytearray(1 << 31)": "MemoryError",
    }.items():
        done, output = run(program, 10, 1 << 30)
        assert not done and reason in output, program
    assert kept.read_text() == "a" and kept.stat().st_mode == mode
    begun = time.monotonic()
    assert not run("while True: pass", 1, 1 << 30)[0] and time.monotonic() - begun < 30
    assert not [each for each in Path("/tmp").glob("program-*") if each.stat().st_mtime > time.time() - 1]


def _strings(prompt: str, answer: str) -> bool:
    kind, *words = prompt[:-1].split()
    if kind == "count":
        return int(answer) == sum(each == words[0] for each in words[2])
    if kind == "drop":
        return answer == ("".join(re.split(words[0], words[2])) or "nothing")
    if kind == "shift":
        return all((ord(b) - ord(a)) % 26 == int(words[2]) for a, b in zip(words[0], answer, strict=True))
    return [words[2][n - 1] for n in range(1, 1 + len(words[2])) if n % int(words[0]) == 0] == list(answer)


@pytest.mark.parametrize("difficulty, side", [(1, 4), (4, 4), (8, 4), (9, 9), (30, 9)])
def test_a_sudoku_has_one_solution(difficulty, side):
    """By trying all orders of the digits of each row that are left, from the first row on."""
    found = environments.sudoku(difficulty, np.random.default_rng(difficulty))
    puzzle = found["prompt"][len("sudoku ") : -1].split("/")
    assert sum(row.count(".") for row in puzzle) == difficulty
    box, digits = {4: 2, 9: 3}[side], "123456789"[:side]
    solutions = [list[str]()]
    for number, row in enumerate(puzzle):
        missing = [each for each in digits if each not in row]
        kept = []
        for above in solutions:
            for order in itertools.permutations(missing):
                left = iter(order)
                line = "".join(next(left) if each == "." else each for each in row)
                rows = [*above, line]
                columns = all(len({each[c] for each in rows}) == len(rows) for c in range(side))
                band = rows[number // box * box :]
                boxes = all(
                    len({each[c + d] for each in band for d in range(box)}) == len(band) * box
                    for c in range(0, side, box)
                )
                kept += [rows] if columns and boxes else []
        solutions = kept
    assert solutions == [found["answer"].split("/")]


def test_environments_are_right():
    for name, check in {
        "addition": lambda prompt, answer: eval(prompt[:-1]) == int(answer),
        "arithmetic": lambda prompt, answer: eval(prompt[:-1]) == int(answer),
        "sorting": lambda prompt, answer: sorted(prompt[5:-1]) == list(answer),
        "reversal": lambda prompt, answer: prompt[8:-1][::-1] == answer,
        "strings": _strings,
    }.items():
        environment = getattr(environments, name)
        for number in range(200):
            found = environments.problem(environment, (1, 4), 0, name, number)
            assert check(found["prompt"], found["answer"]) and 1 <= found["difficulty"] <= 4
            assert found == environments.problem(environment, (1, 4), 0, name, number)
        hard = environment(6, np.random.default_rng(0))["prompt"]
        assert len(hard) > len(environment(1, np.random.default_rng(0))["prompt"])

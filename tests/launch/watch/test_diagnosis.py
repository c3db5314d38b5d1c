"""Which rank is at fault when a run hangs, in simulated runs whose fault is known, and in which words it is said."""

from __future__ import annotations

import pytest

from megatron.launch.watch.diagnosis import diagnose, disagreement, rank_of
from tests.launch.simulated import KINDS, scene

EXPECTED = {  # what each fault is called
    "stopped": {"stopped"},
    "loop": {"busy"},
    "disk": {"busy"},
    "read": {"busy"},
    "skipped": {"skipped", "mismatch"},  # a call that is omitted makes the next one another than that of the others
    "shapes": {"mismatch"},
    "deadlock": {"deadlock"},
    "cable": {"network"},
}


def named(seed: int, kind: str) -> tuple[bool, str]:
    """Whether the sentence blames only the guilty."""
    found = scene(seed, kind)
    said = diagnose([rank_of(each, found.hosts[each["rank"]]) for each in found.told])
    right = bool(said.culprits) and set(said.culprits) <= found.guilty and said.late and said.kind in EXPECTED[kind]
    return right, f"{kind} {seed}: guilty {found.guilty}, named {said.culprits} ({said.kind}): {said.sentence}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_culprit_is_named(kind):
    results = [named(seed, kind) for seed in range(40)]
    wrong = [text for right, text in results if not right]
    assert len(wrong) <= 2, "\n".join(wrong)


def rank(number: int, *, host: str = "node1", inside: dict | None = None, **more) -> dict:
    """Report of an agent about a rank. `inside` has what it calls in a group of ranks 0-3."""
    call = {"key": "d", "name": "the data group", "members": "0-3", "operation": "all_reduce", "elements": 8}
    call |= {"number": 1233, "peer": -1, "new": False, "inside": inside is not None, "age": 312.0, **(inside or {})}
    place = {"rank": number, "pid": 1, "state": "waiting", "step": 7, "phase": "reduce", "age": 320.0, "limit": 180.0}
    return {**place, **more, "calls": [call]}


def said(*told: dict) -> str:
    return diagnose([rank_of(each, f"node{1 + each['rank'] // 2}") for each in told]).sentence


def test_the_sentences():
    waiting = {"number": 1234}
    reads = rank(3, phase="data", detail="read of shard 17", age=415.0, state="in the disk or the network")
    assert said(*(rank(each, inside=waiting) for each in range(3)), reads) == (
        "ranks 0-2 wait in all_reduce 1,234 of the data group since 312 s; "
        "rank 3 is in data of step 7: read of shard 17 since 415 s, waiting for a disk"
    )
    other = {"number": 1234, "elements": 9}
    assert said(*(rank(each, inside=waiting) for each in range(3)), rank(3, inside=other)) == (
        "ranks do not call the same thing as operation 1,234 of the data group: ranks 0-2 call all_reduce with "
        "8 elements, but rank 3 calls all_reduce with 9 elements"
    )
    assert said(*(rank(each, inside=waiting) for each in range(4))) == (
        "ranks 0-3 have all come to all_reduce 1,234 of the data group and none gets on since 312 s: the network "
        "between node1 and node2 is cut"
    )
    assert said(*(rank(each, age=0.1) for each in range(4))) == "ranks 0-3 are at work: reduce of step 7"
    stuck = rank(3, phase="forward", part=2, parts=4, age=200.0)
    stuck["stack"] = 'Thread 2 (most recent call first):\n  File "/a/thread.py", line 81 in _worker\n\n' + (
        'Current thread 1 (most recent call first):\n  File "/a/b.py", line 12 in spin\n  File "/a/c.py", line 3 in f\n'
    )
    assert said(*(rank(each, inside=waiting) for each in range(3)), stuck).endswith(
        "; rank 3 is in forward of step 7 (micro-batch 2 of 4) since 200 s, at /a/b.py:12 in spin"
    )


def test_a_rank_that_does_not_come_out_of_its_imports_is_named_and_not_the_one_that_waits_for_it():
    meets = {"rank": 0, "state": "waiting", "phase": "setup", "detail": "meeting the other ranks", "age": 20.5}
    stuck = {"rank": 1, "state": "in the disk or the network", "phase": "", "age": 22.0}
    found = diagnose([rank_of({**each, "limit": 20.0, "calls": []}, "node1") for each in (meets, stuck)])
    assert found.late and found.culprits == (1,)
    assert found.sentence == "rank 1 is in imports since 22 s, waiting for a disk"


@pytest.mark.parametrize(
    ("form", "other"), [("float32", "bfloat16"), ("float32 from rank 0", "float32 from rank 3")], ids=["type", "root"]
)
def test_calls_of_other_types_and_roots_are_not_the_same(form, other):
    calls = [rank(each, inside={"number": 1234, "form": other if each == 3 else form}) for each in range(4)]
    found = diagnose([rank_of(each, "node1") for each in calls])
    assert (found.kind, found.culprits) == ("mismatch", (3,))
    assert f"ranks 0-2 call all_reduce with 8 elements of {form}, but rank 3 " in found.sentence
    assert found.sentence.endswith(f"8 elements of {other}")


def test_a_rank_that_takes_long_but_not_too_long_is_no_hang():
    """The others are over their limit because they wait for one that saves, which may take longer."""
    told = [rank(each, inside={"number": 1234}) for each in range(3)] + [rank(3, phase="save", limit=1800.0)]
    found = diagnose([rank_of(each, "node1") for each in told])
    assert found.culprits == (3,) and not found.late


def test_messages_between_two_ranks():
    def message(operation: str, peer: int) -> dict:
        return {"key": "peers", "name": "messages", "members": "", "operation": operation, "peer": peer, "number": 5}

    waits = [rank(0, inside=message("recv", 1)), rank(1, phase="backward"), rank(2, inside=message("recv", 1))]
    found = diagnose([rank_of(each, "node1") for each in waits])
    assert found.culprits == (1,) and "rank 0 waits in recv from rank 1" in found.sentence
    both = [rank(0, inside=message("recv", 1)), rank(1, inside=message("recv", 0))]
    assert diagnose([rank_of(each, "node1") for each in both]).kind == "deadlock", "both receive, nobody sends"
    cut = [rank(0, inside=message("recv", 1)), rank(1, inside=message("send", 0))]
    assert diagnose([rank_of(each, "node1") for each in cut]).kind == "network"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_have_ended_are_compared_by_their_last_calls(kind):
    """Where shapes differ, gloo ends ranks. No rank is accused where all have called the same."""
    ended = [scene(seed, kind) for seed in range(40)]
    told = [(disagreement([rank_of(each, "node1") for each in run.told]), run.guilty) for run in ended]
    accused = [(said, guilty) for said, guilty in told if said is not None]
    right = [said for said, guilty in accused if said.kind == "mismatch" and set(said.culprits) <= guilty]
    if kind == "shapes":
        assert len(accused) == 40 and len(right) >= 38
    elif kind == "skipped":
        assert accused and len(right) >= 0.95 * len(accused)
    else:
        assert not accused

"""A bad value is of a passing fault, of a host or of the data: each is injected, and each is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron.features.spikes.attribution import Elsewhere, pending
from tests.features.spikes.test_replay import events
from tests.features.spikes.test_spikes import YAML, losses, same, write
from tests.training.test_run import job

BAD, STEPS = 8, 13
HOME, AWAY = ("node1/0", "node2/0"), ("node2/0", "node1/0")  # of ranks 0 and 1, and where a restart puts them
# what is injected: (cause, size, what is done at non-finite or large values)
CASES = {
    "transient": ("transient", 30.0, "spikes.action=skip"),
    "host": ("host", 30.0, "spikes.action=skip"),
    "host, nan": ("host", float("nan"), "spikes.non_finite=skip"),
    "data": ("data", 30.0, "spikes.action=skip"),
    "data, nan": ("data", float("nan"), "spikes.non_finite=skip"),
}


def start(folder: str, name: str, path: str, places: tuple[str, str], attempt: int) -> tuple[int, list[dict]]:
    """One start of a run. The status with which it ends, and its records."""
    cause, size, policy = CASES.get(name, ("data", 1.0, "spikes.action=skip"))
    options = f"{{step: {BAD if name in CASES else -1}, size: {size}, cause: {cause}, place: node2/0}}".replace(
        "nan", ".nan"
    )
    hook = f"hooks=[{{type: 'tests.trials.miscompute:Miscompute', options: {options}}}]"
    words = (policy, "spikes.attribute=true", "launch.restarts=3", hook, f"data.train={path}", "zero.stage=1")
    words = (*words, f"training.steps={STEPS}")
    os.environ["JOB_PLACE"] = places[torch.distributed.get_rank()]
    try:
        return 0, job(folder, 2, *words, f"run.dir={folder}/{name}", attempt=attempt)
    except Elsewhere as error:
        return error.status, []
    finally:
        del os.environ["JOB_PLACE"]


def all_causes(folder: str, path: str) -> dict[str, list[tuple[int, list[dict]]]]:
    """Each case from its first start on, as the launcher would have it: after status 16 in other places, after 17
    without the host."""
    found = {}
    for name in ("plain", *CASES):
        starts = [start(folder, name, path, HOME, 0)]
        if starts[-1][0] == 16:
            starts.append(start(folder, name, path, AWAY, 1))
        if starts[-1][0] == 17:
            starts.append(start(folder, name, path, ("node1/0", "node3/0"), 2))
        found[name] = starts
    return found


@pytest.mark.tour
def test_each_cause_is_told(tmp_path: Path) -> None:
    from tests.workers import run as on_ranks

    (tmp_path / "tiny.yml").write_text(YAML)
    path = write(tmp_path, list(range(STEPS)), bad=())
    found = on_ranks(2, all_causes, str(tmp_path), path)[0]
    statuses = {name: [status for status, _ in starts] for name, starts in found.items()}
    assert statuses == {
        "plain": [0], "transient": [0], "host": [16, 17, 0], "host, nan": [16, 17, 0], "data": [16, 0],
        "data, nan": [16, 0],
    }  # fmt: skip
    plain = losses([line for line in found["plain"][0][1] if "loss" in line])
    for name, (cause, _, _) in CASES.items():
        told = events(tmp_path, name, "attribution")
        replayed = [each["repeated"] for each in events(tmp_path, name, "replay")]
        if cause == "transient":
            assert replayed == [False] and not told and not events(tmp_path, name, "suspect")
        else:
            (suspect,), (said,) = events(tmp_path, name, "suspect"), told
            assert suspect["step"] == said["step"] == BAD and suspect["places"] == list(HOME)
            assert said["cause"] == cause, name
            assert said["places"] == (["node2/0"] if cause == "host" else []), "the host where the loss was the worse"
        if cause != "data":  # the value that counts is the good one
            assert losses([line for line in found[name][-1][1] if "loss" in line])[-5:] == plain[-5:]
            same(tmp_path, name, STEPS, "plain", STEPS)
        else:
            assert [each["step"] for each in events(tmp_path, name, "spike")] == [BAD], "the policy follows"


def test_a_suspect_waits_until_it_is_told() -> None:
    suspect, told = {"event": "suspect", "step": 3}, {"event": "attribution", "step": 3}
    assert pending([]) is None and pending([suspect, told]) is None and pending([told, suspect]) == suspect
    assert pending([suspect, {"event": "attribution", "step": 2}]) == suspect
    with pytest.raises(Elsewhere):
        raise Elsewhere("", 3)

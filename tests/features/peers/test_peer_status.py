"""Lines of `deepy status` about peers, from the ledger of a run."""

from __future__ import annotations

import pytest

from megatron.config import save_resolved
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.launch.command_line import of_features
from megatron.report.ledger import Ledger
from tests.features.peers.companies import VALUES, secret

ROUND = {"absent": {}, "decided_by": "a"}


def lines(tmp_path, rounds: list[dict], **keys) -> list[str]:
    own = {
        "every": 2, "name": "a", "members": ["a", "b", "far"], "folder": str(tmp_path), "signature": "shared_key",
        "key_file": secret(tmp_path), **keys,
    }  # fmt: skip
    values = {**VALUES, "run": {"dir": str(tmp_path / "run")}, "peers": own}
    resolved = combine([ConfigSource(values)], ranks=1)
    ledger = Ledger(tmp_path / "run/ledger.jsonl")
    for each in rounds:
        ledger.write("peers_round", **{**ROUND, **each, "step": each["round"]})
    ledger.close()
    save_resolved(resolved, tmp_path / "run/config.yml")
    return of_features(tmp_path / "run").splitlines()


def test_rounds(tmp_path):
    found = lines(
        tmp_path,
        [
            {"round": 4, "members": ["a", "b"]},
            {"round": 5, "members": ["a"], "absent": {"b": "silent"}},
            {"round": 6, "members": ["a"], "absent": {"far": "values that are not finite"}, "strikes": {"far": 3}},
        ],
    )
    assert found[0].endswith(": round 6, 0:00:00 ago") and "peer a of the run peers" in found[0]
    assert [each.split() for each in found[1:2]] == [["a", "here"]]
    assert "2 behind, last seen in 4, 0:00:00 ago" in found[2]
    assert "excluded for good, 3 of 3 strikes (values that are not finite)" in found[3]


def test_slots(tmp_path):
    keys = {"every": 1, "algorithm": "gradients"}
    found = lines(tmp_path, [{"round": 9, "members": ["a", "b"], "absent": {"b": "late"}, "next": ["a"]}], **keys)
    assert "the last change was in step 9" in found[0] and "here" in found[1] and "not seen" in found[3]
    assert "0 behind, last seen in 9, 0:00:00 ago, late" in found[2]


@pytest.mark.parametrize(
    "keys, text", [({}, "no round yet"), ({"every": 1, "algorithm": "gradients"}, "all have slots since the start")]
)
def test_before_the_first_entry(tmp_path, keys, text):
    assert lines(tmp_path, [], **keys)[0].endswith(text)


GOOD = {"round": 4, "members": ["a", "b"]}


@pytest.mark.parametrize(
    "damage",
    [
        {"time": "no time"}, {"time": 7}, {"time": "0001-01-01T00:00:00+05:00"}, {"members": None}, {"absent": ["b"]},
        {"strikes": {"b": "x"}}, {"next": 5},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_entries_are_skipped(tmp_path, damage):
    found = lines(tmp_path, [GOOD, {"round": 5, "members": ["a"], **damage}])
    assert ": round 4, " in found[0]


def test_a_time_without_a_zone(tmp_path):
    assert ": round 4, " in lines(tmp_path, [{**GOOD, "time": "2026-01-02T03:04:05"}])[0]


def test_a_run_without_peers_adds_nothing(tmp_path):
    plain = combine([ConfigSource({**VALUES, "run": {"dir": str(tmp_path)}})], ranks=1)
    save_resolved(plain, tmp_path / "config.yml")
    assert of_features(tmp_path) == of_features(tmp_path / "gone") == ""

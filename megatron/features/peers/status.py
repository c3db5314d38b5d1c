"""Lines of `deepy status` about a peer: who takes part, by the rounds in the ledger of its run. Without torch."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.report.console import duration
from megatron.report.ledger import read_ledger

from .options import GRADIENTS, peers_of


def status(config: Config, folder: Path) -> list[str]:
    """Lines about the peers of the run in a folder."""
    own, path = peers_of(config), folder / "ledger.jsonl"
    rounds = [each for each in read_ledger(path) if _is_round(each)] if path.exists() else []
    head = f"peer {own.name} of the run {own.run} in {own.folder}"
    if not rounds:
        return [f"{head}: no round yet" if own.algorithm != GRADIENTS else f"{head}: all have slots since the start"]
    newest = rounds[-1]
    change = "the last change was in step" if own.algorithm == GRADIENTS else "round"
    lines = [f"{head}: {change} {newest['round']}, {_ago(newest)}"]
    width = max(map(len, own.members))
    return lines + [f"  {name:<{width}}  {_state(name, rounds, own.strikes)}" for name in own.members]


def _is_round(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is of a round, with facts of the types that are used here."""
    strikes, lists = entry.get("strikes", {}), (entry.get("members"), entry.get("next", []))
    try:
        datetime.fromisoformat(entry["time"]).astimezone(UTC)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
    return (
        entry["event"] == "peers_round"
        and type(entry.get("round")) is int
        and all(isinstance(each, list) for each in lists)
        and isinstance(entry.get("absent"), dict)
        and isinstance(strikes, dict)
        and all(type(each) is int for each in strikes.values())
    )


def _state(name: str, rounds: list[dict[str, Any]], most: int) -> str:
    newest = rounds[-1]
    strikes = newest.get("strikes", {}).get(name, 0)
    reason = next((each["absent"][name] for each in reversed(rounds) if name in each["absent"]), "")
    strikes_text = f", {strikes} of {most} strikes ({reason})" if strikes else ""
    if strikes >= most:
        return f"excluded for good{strikes_text}"
    if name in newest.get("next", newest["members"]):
        return f"here{strikes_text}"
    last = next((each for each in reversed(rounds) if name in each["members"]), None)
    if last is None:
        return f"not seen{strikes_text}"
    lag = newest["round"] - last["round"]
    silent = f", {newest['absent'][name]}" if name in newest["absent"] and not strikes else ""
    return f"{lag} behind, last seen in {last['round']}, {_ago(last)}{silent}{strikes_text}"


def _ago(entry: Mapping[str, Any]) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(entry["time"]).astimezone(UTC)).total_seconds()
    return f"{duration(max(seconds, 0.0))} ago"

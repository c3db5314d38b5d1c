"""Options of commands that decode with Loki or SiftAttention, without torch."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `read_less.chosen` reads."""
    group = parser.add_argument_group("reading fewer keys or values (approximate)")
    group.add_argument("--loki", type=Path, metavar="FILE", help="choose keys by components, from deepy calibrate")
    rank = "Loki: components by which keys are chosen, or the share of variance that they explain (default: 0.9)"
    group.add_argument("--rank", type=number, default=0.9, help=rank)
    keys = "Loki: keys that a head reads, or their share of a text (default: 0.25)"
    group.add_argument("--keys", type=number, default=0.25, help=keys)
    quantile = "Sift: read values whose probability is above this quantile of a head's probabilities, such as 0.8"
    group.add_argument("--sift", type=float, metavar="QUANTILE", help=quantile)
    group.add_argument(
        "--warmup", type=int, default=16, help="Sift: tokens of a text with full attention (default: 16)"
    )


def number(text: str) -> float | int:
    """A number of things, or a share of them, which has a decimal point."""
    return float(text) if "." in text else int(text)

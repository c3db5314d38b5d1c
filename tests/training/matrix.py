"""tests/layouts.yml as cases: which architecture trains on which layout by which recipe, and how exact it must be."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[1] / "layouts.yml"


@dataclass(frozen=True)
class Bounds:
    """Largest relative errors allowed.

    Attributes:
        loss: of the loss of each step and of the evaluation.
        norm: of the gradient norm of each step.
        weights: of each tensor, in the Euclidean norm.
        change: the same error over how far the tensor moved during the run.
    """

    loss: float
    norm: float
    weights: float
    change: float


@dataclass(frozen=True)
class Case:
    """One training run of the matrix."""

    recipe: str
    architecture: str
    layout: str
    ranks: int
    values: dict[str, Any]  # the configuration
    plain: dict[str, Any]  # the same without the layout
    bounds: Bounds
    slow: bool = False  # `make layouts` omits it, whatever it adds

    @property
    def name(self) -> str:
        return f"{self.recipe}: {self.architecture} on {self.layout}"

    @property
    def part(self) -> str:
        """Which of the files test_layouts_*.py runs it: each is run in one go, and none may take too long."""
        layers = self.values["model"]["layers"]
        if "moe" in layers:
            return "experts"
        if any(kind in layers for kind in ("mamba", "rwkv", "gated_delta")):
            return "recurrent"
        return "dense" if self.ranks <= 2 else "dense_wide"


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts, the later over the earlier."""
    result: dict[str, Any] = {}
    for tree in trees:
        for name, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = merged(result[name], value) if both else value
    return result


def read(file: Path = FILE) -> dict[str, Any]:
    """The file's content, a copy of one's own."""
    return deepcopy(_parsed(file))


@cache
def _parsed(file: Path) -> dict[str, Any]:
    """Read once per process, and by libyaml where it is: tests read it in each of their ranks."""
    return yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def cases(matrix: dict[str, Any] | None = None) -> list[Case]:
    """All cases, fewer ranks first."""
    matrix = matrix or read()
    found = []
    for recipe, entry in matrix["recipes"].items():
        bounds = Bounds(**entry["bounds"])
        for group in entry["runs"]:
            for layout in _named(group["layouts"], matrix["layouts"]):
                for architecture in _named(group["architectures"], matrix["architectures"]):
                    own = {
                        k: v for k, v in matrix["architectures"][architecture].items() if k not in ("about", "apart")
                    }
                    cut = {k: v for k, v in matrix["layouts"][layout].items() if k != "ranks"}
                    plain = merged(matrix["common"], own, entry["values"])
                    found.append(
                        Case(
                            recipe,
                            architecture,
                            layout,
                            matrix["layouts"][layout]["ranks"],
                            merged(plain, cut),
                            plain,
                            bounds,
                            group.get("slow", False),
                        )
                    )
    return sorted(found, key=lambda case: case.ranks)


def part(name: str) -> list[Case]:
    return [case for case in cases() if case.part == name]


def _named(names: str | list[str], known: dict[str, Any]) -> list[str]:
    chosen = [name for name, entry in known.items() if not entry.get("apart")] if names == "all" else list(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"{FILE.name} names {name!r}, which is none of {', '.join(known)}")
    return chosen

"""Keys that follow from other keys. Each has its formula and its function where it is declared (`section.Derived`).
This file puts them in order and computes them.

A function reads resolved values through a `View` and returns the value. It returns None where the key has no meaning,
or an input is not known (no tokenizer, an unknown number of ranks)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .pattern import PatternError, blocks_of, names_of
from .schema import Config, Path, catalog_of, current_schema, parse_path
from .section import Derived
from .source.layers import Origin
from .tree import expand, get, put


@dataclass
class View:
    """The values so far, with the run's name and ranks."""

    values: dict[str, Any]  # the nested values of the whole configuration
    name: str = "run"  # the run's name by its first configuration file (`files.run_name`)
    ranks: int | None = None  # processes of the whole run, if known

    def __getitem__(self, key: str) -> Any:
        return get(self.values, parse_path(key), None)

    @property
    def data_ranks(self) -> int | None:
        """The data parallel size, if the number of ranks is known and can be cut."""
        inner = self["parallel.tensor"] * self["parallel.columns"] * self["parallel.pipeline"]
        inner *= self["parallel.context"] or self["parallel.folded"]
        return self.ranks // inner if self.ranks and self.ranks % inner == 0 else None

    def uses(self, kind: str) -> bool:
        """Whether the layer pattern has a layer of this kind."""
        try:
            return kind in names_of(self["model.layers"], tuple(self["model.extensions"]))
        except PatternError:
            return False

    @property
    def blocks(self) -> list:
        """The blocks of the pattern, or none if it cannot be read, which a rule reports."""
        try:
            return list(blocks_of(self["model.layers"], tuple(self["model.extensions"])))
        except PatternError:
            return []


@dataclass(frozen=True)
class Derivation:
    """How a key is filled in."""

    key: str  # its name. A `*` stands for each member.
    keys: tuple[str, ...]  # the inputs of the formula
    derived: Derived

    @property
    def origin(self) -> Origin:
        """Of a value that it gives."""
        return Origin("derived", text=self.derived.formula, keys=self.keys)

    def value(self, path: Path, view: View) -> Any:
        """Its value for the key at `path`."""
        return self.derived.function(get(view.values, path[:-1]), view)


@cache
def derivations(schema: type[Config]) -> tuple[Derivation, ...]:
    """All derived keys, each after its inputs. Keys that read each other are in the schema's order."""
    rules = {}
    for key in catalog_of(schema).values():
        if key.rule is not None:
            section = ".".join(key.path[:-1])
            reads = tuple(f"{section}{name}" if name.startswith(".") else name for name in key.rule.reads)
            rules[key.name] = Derivation(key.name, reads, key.rule)
    ordered: dict[str, Derivation] = {}
    begun: set[str] = set()

    def add(name: str) -> None:
        if name in rules and name not in begun:
            begun.add(name)
            for other in rules[name].keys:
                add(other)
            ordered[name] = rules[name]

    for name in rules:
        add(name)
    return tuple(ordered.values())


# Keys that only the processes, the machine or the tokenizer can fill in.
AT_START = tuple(
    (
        "launch.ranks launch.master_address launch.master_port launch.working_directory logging.peak_tflops "
        "tokenizer.eod_token tokenizer.eod_id"
    ).split()
)
# Keys that stay open where the number of ranks, or the tokenizer, is not known.
NEED_RANKS = ("training.global_batch_size", "training.accumulation")
NEED_TOKENIZER = ("model.vocab_size",)


def derive(view: View) -> dict[Path, Origin]:
    """Fill in every derivable key of `view.values` that is None, in place.

    Args:
        view: the values, all defaults present.

    Returns:
        The origins of the keys that were filled in.
    """
    origins: dict[Path, Origin] = {}
    for rule in derivations(current_schema()):
        for path in expand(view.values, tuple(rule.key.split("."))):
            if get(view.values, path, None) is not None:
                continue
            value = rule.value(path, view)
            if value is not None:
                put(view.values, path, value)
                origins[path] = rule.origin
    return origins


def unknown_after(unknown: frozenset[str], given: Callable[[str], bool]) -> frozenset[str]:
    """`unknown` keys, and all derived keys that follow from them (unless the user gave those)."""
    spread = set(unknown)
    for rule in derivations(current_schema()):
        if spread.intersection(rule.keys) and not given(rule.key):
            spread.add(rule.key)
    return frozenset(spread)

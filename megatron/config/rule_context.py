"""The argument of rules (the configuration, the ranks, and the origin of each value), and rules of one expression."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .kind import KindUse, LayerKind, kinds_of
from .pattern import BlockPattern, Kind, PatternError
from .problems import Problem
from .schema import Config, Path, dotted, lookup, parse_path
from .section import Section
from .sequences import choose_cut
from .source.layers import Origin
from .variants import options_of

# Variables of programs that start ranks: the number of all ranks, and of the ranks on this host.
SIZES = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class RuleContext:
    """A derived configuration with its ranks and origins."""

    config: Config  # every derivable key filled in
    ranks: int | None  # processes of the whole run. None if unknown: rules about the layout of data are then skipped.
    origin: Callable[[Path], Origin] = field(repr=False)  # where the value at a path came from
    files: tuple[str, ...] = ()  # the configuration files, as the user named them
    here: bool = True  # whether the run starts now and, by default, on this machine. False where a job script is made.
    # `resolution.resolve`, for configurations that come with this one
    resolve: Callable[..., Config] | None = field(default=None, repr=False)
    named_store: bool = False  # whether the URL of a level had `{run.name}`, for which the name now stands

    @cached_property
    def values(self) -> dict[str, Any]:
        """The configuration as nested dictionaries."""
        return self.config.model_dump()

    @property
    def starts_here(self) -> bool:
        """Whether the ranks surely run on this machine."""
        launch = self.config.launch
        local = launch.hostfile is None and launch.runner in ("auto", "local") and "SLURM_JOB_ID" not in os.environ
        # ranks that another program started, such as torchrun on each host
        one_host = all(os.environ.get(world) == os.environ.get(host) for world, host in SIZES)
        return local and one_host and self.here

    @property
    def inner(self) -> int:
        """Ranks of one data parallel replica."""
        parallel = self.config.parallel
        return parallel.tensor * parallel.columns * parallel.pipeline * parallel.context

    @property
    def data_ranks(self) -> int | None:
        """The data parallel size, if it is known."""
        return self.ranks // self.inner if self.ranks and self.ranks % self.inner == 0 else None

    @property
    def replicas(self) -> int | None:
        """Ranks that hold the same parameters (data and context parallel ones), if their number is known."""
        return None if self.data_ranks is None else self.data_ranks * self.config.parallel.context

    @cached_property
    def blocks(self) -> list[BlockPattern]:
        """The blocks of `model.layers`, or none if it cannot be read."""
        try:
            return list(self.config.model.blocks)
        except PatternError:
            return []

    @cached_property
    def further_block(self) -> BlockPattern | None:
        """The block of each module that predicts a further token, or None."""
        try:
            return next(iter(self.config.model.further_blocks), None)
        except PatternError:
            return None

    @property
    def kinds(self) -> Mapping[str, LayerKind]:
        """All kinds that the pattern could name."""
        return kinds_of(tuple(self.config.model.extensions))

    def layers(self, kind: str | None = None) -> list[KindUse[Any]]:
        """Every layer, or each of a kind, in order. Layers whose variant does not exist are skipped, and a rule reports
        them."""
        found = (each for block in self.blocks for each in block.kinds if kind in (None, each.name))
        return [self._use(each) for each in found if self._is_known(each)]

    @cached_property
    def used(self) -> list[KindUse[Any]]:
        """Each kind of the pattern, and each of its variants, once."""
        named = dict.fromkeys((each.name, each.variant) for block in self.blocks for each in block.kinds)
        kinds = (Kind(name, variant) for name, variant in named)
        return [self._use(kind) for kind in kinds if self._is_known(kind)]

    def _is_known(self, kind: Kind) -> bool:
        return kind.variant is None or kind.variant in self.config.model.variants

    def _use(self, kind: Kind) -> KindUse[Any]:
        return KindUse(self, kind.name, kind.variant, options_of(self.config.model, kind))

    @cached_property
    def zigzag(self) -> bool:
        """Whether a rank has two runs of each sequence. False where the pattern cannot be read."""
        try:
            return self.config.parallel.context > 1 and choose_cut(self.config)[0] == "zigzag"
        except (PatternError, KeyError):  # of a layer, or of a variant
            return False

    def uses(self, kind: str) -> bool:
        """Whether the pattern has a layer of this kind."""
        return any(each.name == kind for block in self.blocks for each in block.kinds)

    def value(self, key: str) -> Any:
        """The value of a dotted key. Parts of digits are indices."""
        return self._at(parse_path(key))

    def option(self, key: str) -> Any:
        """The value of a dotted key that a feature may have, or None where no feature has it."""
        return self.value(key) if lookup(parse_path(key)) else None

    def _at(self, path: Path) -> Any:
        value: Any = self.config
        for part in path:
            value = getattr(value, str(part)) if isinstance(value, Section) else value[part]
        return value

    def given(self, key: str) -> bool:
        """Whether the user gave this key."""
        return self.origin(parse_path(key)).given

    def problem(self, keys: str, *others: str, rule: str, fix: str, fatal: bool = True) -> Problem:
        """A problem with the first of `keys`, which are separated by spaces, and with `others`.

        Values and places are filled in here."""
        key, *more = keys.split()
        return self.problem_at(parse_path(key), *more, *others, rule=rule, fix=fix, fatal=fatal)

    def problem_at(self, path: Path, *others: str, rule: str, fix: str, fatal: bool = True) -> Problem:
        """`problem` for a key whose path has names that a dotted key would split."""
        origin = self.origin(path)
        if origin.kind == "derived":  # lead the user to what they wrote
            others = tuple(dict.fromkeys((*others, *(key for key in origin.keys if "*" not in key))))
        seen = tuple((other, self.value(other), str(self.origin(parse_path(other)))) for other in others)
        written = (self.origin(parse_path(key)) for key in origin.keys if "*" not in key)
        where = next((place for place in written if place.given), origin)
        return Problem(dotted(path), rule, fix, self._at(path), str(where), seen, fatal)

    def warning(self, keys: str, *others: str, rule: str, fix: str) -> Problem:
        """A problem that does not stop the run."""
        return self.problem(keys, *others, rule=rule, fix=fix, fatal=False)


Text = str | Callable[[Config], str]  # a function where it depends on values


@dataclass(frozen=True)
class Check:
    """A rule whose condition and texts need the configuration only."""

    keys: Text  # the key with the problem, then the keys that it must fit, separated by spaces
    broken: Callable[[Config], Any]  # whether a configuration breaks the rule
    rule: Text  # rule, fix: of the problem
    fix: Text
    fatal: bool = True  # False for a warning

    def __call__(self, context: RuleContext) -> Iterator[Problem]:
        config = context.config
        if self.broken(config):
            texts = (self.keys, self.rule, self.fix)
            keys, rule, fix = (text if isinstance(text, str) else text(config) for text in texts)
            yield context.problem(keys, rule=rule, fix=fix, fatal=self.fatal)


def check_order(context: RuleContext, path: Path, key: str, entries: Sequence[object], what: str) -> Iterator[Problem]:
    """Problems of entries of the list at `path` whose `key`, a step, is not above that of the entry before."""
    steps = [getattr(entry, key) for entry in entries]
    for index, (before, after) in enumerate(zip(steps, steps[1:]), 1):
        if after <= before:
            rule = f"must be above the {what} before, {before}"
            yield context.problem_at((*path, index, key), rule=rule, fix=f"use more than {before}")

"""The plan of a set: the source and the sample in it for each sample n of a run.

A plan belongs to one set (training, a validation set, a test set) and depends on the configuration only: not on ranks,
micro-batches or earlier reads. Training data may change their blend at given steps (phases). A source that continues in
a later phase continues where it stopped."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron.config import Config
from megatron.config.arithmetic.batches import Batches
from megatron.objectives.contract import Objective

from .contract import SampleSource
from .errors import DataError
from .order.blend import Blend
from .sample import AssemblyOptions, Sample
from .source import OrderedSource


@dataclass(frozen=True)
class Targets:
    """Final treatment of a plan's samples."""

    objective: Objective | None = None  # None keeps the weights of the data
    boundaries: bool = False  # mark starts of documents

    @property
    def weighs(self) -> bool:
        return self.objective is not None and self.objective.weighs

    @property
    def columns(self) -> tuple[str, ...]:
        """Numbers of each label that samples must have."""
        return () if self.objective is None else self.objective.columns

    @property
    def context(self) -> int:
        """Tokens before a sample that its weights depend on."""
        return self.objective.context if self.weighs and self.objective is not None else 0

    @property
    def marks_documents(self) -> bool:
        """Whether samples must mark starts of documents."""
        return self.boundaries or (self.objective is not None and self.objective.needs_documents)

    def of(self, sample: Sample) -> Sample:
        """The sample with its labels' final weights.

        Raises:
            DataError: the objective does not give a weight of at least 0 for each label.
        """
        begins = sample.begins if self.boundaries else None
        if self.objective is None or not self.objective.weighs:
            return sample if begins is sample.begins else replace(sample, begins=begins)
        weights = self._weights(sample, self.objective)
        if weights.shape != (len(sample.tokens) - 1,) or not (np.isfinite(weights) & (weights >= 0)).all():
            rule = (
                f"each of a sample's {len(sample.tokens) - 1} labels must have a finite weight of at least 0: "
                f"{type(self.objective).__name__} gives an array {weights.shape} from {weights.min(initial=np.inf)} "
                f"to {weights.max(initial=-np.inf)}"
            )
            raise DataError("objective.type", rule, "fix its method weights")
        return replace(sample, weights=weights if sample.weights is None else weights * sample.weights, begins=begins)

    @staticmethod
    def _weights(sample: Sample, objective: Objective) -> np.ndarray:
        """The objective's weights of a sample's labels, read with the tokens before it."""
        tokens, begins = sample.tokens, sample.begins if objective.needs_documents else None
        lead = 0 if sample.lead is None else len(sample.lead)
        if sample.lead is not None and lead:
            tokens = np.concatenate([sample.lead.astype(np.int64), tokens])
            if begins is not None:
                begins = np.concatenate([np.arange(lead) == 0, [False], begins[1:]])
        return np.asarray(objective.weights(tokens, begins), np.float32)[lead:]


MANY_EPOCHS = 4.0  # repetition beyond this hurts (Muennighoff et al., 2023)


@dataclass(frozen=True)
class SourceUse:
    """A run's use of one source."""

    name: str
    path: str
    order: str
    weight: float  # requested share of the samples (of its first phase)
    samples: int
    tokens: int
    epochs: float  # tokens read, as a multiple of the `available` ones
    available: int  # tokens of the source. 0 for a stream whose tokens are not counted yet.


@dataclass(frozen=True)
class PlannedPhase:
    """A blend for samples start ... start + length of the run."""

    start: int
    length: int
    blend: Blend
    members: tuple[int, ...]  # numbers of its sources in the plan
    counts: tuple[float, ...]  # weight of each label of each source
    offsets: tuple[int, ...]  # samples that earlier phases took of each of its sources


class SamplePlan:
    """The plan of a set that is read from files.

    Attributes:
        batches: samples per step.
        steps: steps of the set (for validation: per evaluation).
        sources: each different source once.
        period: the run repeats itself after this many samples. None: never.
        masked: whether any label of any sample may not count. It is equal on all ranks, which add up weights together.
    """

    def __init__(
        self,
        phases: list[PlannedPhase],
        sources: list[OrderedSource],
        options: AssemblyOptions,
        batches: Batches,
        steps: int,
        targets: Targets,
        parts: int = 1,
        weighted: bool = True,
    ):
        """Args:
        parts: number of parts in a batch. A repeating order repeats after whole parts.
        weighted: whether sources and documents have their training weights."""
        self.weighted = weighted
        self.phases, self.sources, self.options, self.targets = phases, sources, options, targets
        self.batches, self.steps = batches, steps
        self.columns: tuple[str, ...] = ()
        self.masked = (
            options.mask_eod
            or options.corruption is not None
            or targets.weighs
            or any(each.opened.labels is not None or each.leaves_room for each in sources)
            or any(each.opened.document_weights is not None for each in sources if weighted)
            or any(counts != 1.0 for phase in phases for counts in phase.counts)
        )
        self._starts = [phase.start for phase in phases]
        only = phases[0]
        repeats = len(phases) == 1 and all(not sources[each].order.endless for each in only.members)
        unit = batches.sizes[-1] // parts
        self.period = (only.length // unit * unit or only.length) if repeats else None

    def place(self, number: int) -> tuple[PlannedPhase, int, int]:
        """For sample n: its phase, the source's position in it, and the sample k of that source."""
        number = number % self.period if self.period else number
        phase = self.phases[bisect_right(self._starts, number) - 1]
        if number - phase.start >= phase.blend.size:
            rule = f"sample {number} lies beyond the last step, {self.steps - 1}"
            raise DataError("training.steps", rule, "ask for an earlier step")
        member, count = phase.blend.locate(number - phase.start)
        return phase, member, phase.offsets[member] + count

    def sample(self, number: int) -> Sample:
        """Sample n of the run."""
        phase, member, sample = self.place(number)
        source = self.sources[phase.members[member]]
        made = source.sample(sample, self.options, number, phase.counts[member], self.weighted)
        return self.targets.of(made)

    def drawn(self, source: int, samples: int) -> int:
        """Number of the first `samples` samples that come from a source."""
        passes, rest = divmod(samples, self.period) if self.period else (0, samples)
        return passes * self._drawn(source, self.period or 0) + self._drawn(source, rest)

    def _drawn(self, source: int, samples: int) -> int:
        total = 0
        for phase in self.phases:
            part = min(max(samples - phase.start, 0), phase.blend.size)
            total += sum(phase.blend.drawn(place, part) for place, each in enumerate(phase.members) if each == source)
        return total

    def highest(self, source: int, samples: int) -> int:
        """One more than the largest sample k of a source among the first `samples` samples of the run."""
        if self.period and samples > self.period:
            return self._drawn(source, self.period)
        return self._drawn(source, samples)

    def numbers(self, source: int, sample: int, below: int) -> Iterator[int]:
        """All n < `below` that are sample k of a source."""
        for phase in self.phases:
            if source not in phase.members:
                continue
            place = phase.members.index(source)
            count = sample - phase.offsets[place]
            draw = phase.blend.find(place, count) if count >= 0 else None
            end = self.period if self.period else phase.length
            if draw is not None and draw < end:
                yield from range(phase.start + draw, below, self.period or max(below, 1))

    def uses(self) -> list[SourceUse]:
        """The whole run's use of each source."""
        total, result = self.batches.before(self.steps), []
        for source in self.sources:
            samples = self.drawn(source.index, total)
            tokens = samples * self.options.new_tokens
            weight = next(
                float(phase.blend.weights[phase.members.index(source.index)])
                for phase in self.phases
                if source.index in phase.members
            )
            available = 0 if source.opened.grows else source.order.tokens
            texts = (source.name, str(source.file.prefix), source.order.description)
            result.append(
                SourceUse(*texts, weight, samples, tokens, tokens / available if available else 0.0, available)
            )
        return result

    def document_weights(self) -> dict[str, str]:
        """For each source with weights of documents, their hash."""
        hashes = {f"{each.index} {each.name}": each.opened.weights_hash for each in self.sources}
        return {name: hash for name, hash in hashes.items() if hash is not None}

    def warnings(self) -> list[str]:
        """Settings that are allowed but probably mistakes."""
        found = [note for source in self.sources if (note := source.file.note)]
        length = self.options.sequence_length
        found += [
            f"source {use.name} is read {use.epochs:.1f} times ({use.tokens:,} of {use.available:,} tokens)"
            for use in self.uses()
            if use.epochs > MANY_EPOCHS
        ]
        if (spans := self.options.corruption) and (
            empty := (1 - spans.rate) * (1 - self.options.new_tokens / length)
        ) > 0.01:
            found.append(
                f"data.span_corruption: about {empty:.0%} of a sample is empty, where documents that are not corrupted "
                "do not grow. rate=1 fills it"
            )
        if self.period and self.batches.before(self.steps) > self.period:
            found.append(f"the order has {self.period:,} samples, repeated from step {self.batches.step(self.period)}")
        return found


class SyntheticPlan:
    """The plan of a set without token files."""

    def __init__(self, made: SampleSource, config: Config, batches: Batches, steps: int, targets: Targets):
        self.made, self.batches, self.steps, self.targets = made, batches, steps, targets
        self.sources: list[OrderedSource] = []
        self.masked, self.columns = made.masked or targets.weighs, targets.columns
        self.name, self.vocabulary = config.data.synthetic, config.model.vocab_size
        self.one_document = np.arange(config.training.sequence_length + 1) == 0

    def sample(self, number: int) -> Sample:
        """Sample n of the run.

        Raises:
            DataError: the source returns an invalid sample.
        """
        found = self.made.sample(number)
        self._check(f"sample {number}", found, self.columns)
        if found.begins is None and self.targets.marks_documents:
            found = replace(found, begins=self.one_document)
        return self.targets.of(found)

    def probe(self, number: int, columns: tuple[str, ...]) -> Sample:
        """The probe of sample n, with numbers of each label by these names.

        Raises:
            DataError: the source has no probes, or returns an invalid one.
        """
        made = getattr(self.made, "probe", None)
        if made is None:
            fix = "use data.synthetic=rated, or give your source the method probe"
            raise DataError("data.synthetic", f"{self.name} has no probes, which the objective reads", fix)
        found = made(number)
        self._check(f"probe {number}", found, columns)
        return found

    def _check(self, what: str, found: Sample, columns: tuple[str, ...]) -> None:
        length, wrong = len(self.one_document), None
        if found.tokens.shape != (length,) or found.tokens.dtype != np.int64:
            wrong = f"must have tokens int64 [{length}]: {found.tokens.dtype} {list(found.tokens.shape)}"
        elif found.tokens.min() < 0 or found.tokens.max() >= self.vocabulary:
            low, high = found.tokens.min(), found.tokens.max()
            wrong = f"must have ids below model.vocab_size = {self.vocabulary}: {low} ... {high}"
        elif found.weights is not None and (not self.made.masked or found.weights.shape != (length - 1,)):
            wrong = f"must have weights [{length - 1}], and `masked` say so: {list(found.weights.shape)}"
        elif found.begins is not None and found.begins.shape != (length,):
            wrong = f"must say of {length} tokens whether a document begins there: {list(found.begins.shape)}"
        for name in columns:
            column = (found.columns or {}).get(name)
            if column is None or column.shape != (length - 1,) or column.dtype != np.float32:
                wrong = f"must have the column {name!r}, float32 [{length - 1}], which the objective reads"
        if wrong:
            fix = f"correct its files, or its method {what.split()[0]}"
            raise DataError("data.synthetic", f"{what} of {self.name} {wrong}", fix)

    def uses(self) -> list[SourceUse]:
        return []

    def document_weights(self) -> dict[str, str]:
        return {}

    def warnings(self) -> list[str]:
        return []


SampleSet = SamplePlan | SyntheticPlan

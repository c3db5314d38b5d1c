"""Build the plans of a configuration: files, weights, orders and phases of each set."""

import math
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from megatron.config import Config
from megatron.config.arithmetic.batches import Batches, batches_of, tokens_read
from megatron.config.features.feature import share_of
from megatron.config.parts import resolve_import
from megatron.config.problems import UserError
from megatron.config.registry import SOURCE
from megatron.config.sections.data import SourceSection, SpanCorruptionSection, TokenizerSection
from megatron.objectives.named import objective_of

from .contract import SampleSource
from .errors import DataError
from .order.blend import Blend, normalised_weights, weights_by_documents
from .plan import PlannedPhase, SamplePlan, SyntheticPlan, Targets
from .sample import AssemblyOptions, Corruption, Infilling
from .skipped_batches import reserve
from .source import OrderedSource, SourceFile
from .tokenizer import build_tokenizer


def set_names(config: Config, split: str) -> list[str]:
    """Names of the validation or test sets of a configuration."""
    data = config.data
    given = list(getattr(data, split))
    share = {"validation": 1, "test": 2}[split]
    if data.split is not None and len(data.split) > share and data.split[share] > 0:
        return [split]
    return given or ([split] if data.synthetic != "none" and split == "validation" else [])


def build_plan(config: Config, split: str = "train", name: str | None = None) -> SamplePlan | SyntheticPlan:
    """The plan of a set.

    Args:
        config: the resolved configuration.
        split: "train", "validation" or "test".
        name: of the validation or test set. Default: the only one.

    Raises:
        DataError: there is no such set, or its files cannot be used.
    """
    return _Builder(config, split, name).build()


class _Builder:
    def __init__(self, config: Config, split: str, name: str | None):
        if split not in ("train", "validation", "test"):
            raise DataError("split", f"there is no split {split!r}", "use train, validation or test")
        self.config, self.split, self.data = config, split, config.data
        names = [None] if split == "train" else set_names(config, split)
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            raise DataError(
                f"data.{split}",
                f"there is no set {name!r}, only {', '.join(map(str, names)) or 'none'}",
                f"give data.{split}, or a share in data.split",
            )
        self.name = name
        shares = share_of(config)[1]
        self.batches = (
            batches_of(config).times(shares) if split == "train" else Batches((config.training.global_batch_size,))
        )
        objective = objective_of(config)
        trains = split == "train" or objective.scores  # other sets are scored by cross-entropy
        self.targets = Targets(objective if trains else None, self.data.reset_attention_at_eod)
        if self.targets.columns and self.data.synthetic == "none":
            columns = ", ".join(self.targets.columns)
            rule = f"{config.objective.type} reads numbers of labels that token files do not have: {columns}"
            raise DataError("objective.type", rule, "use data.synthetic=pairs, or a source of your own that has them")
        length = config.training.sequence_length
        self.read = tokens_read(lambda key: attrgetter(key)(config)) if split == "train" else length

    @property
    def requested(self) -> tuple[int, bool]:
        """Steps to read, and whether the set is read once as a whole instead (its steps are then unknown)."""
        if self.split == "train":
            return self.config.training.steps, False
        return self.config.evaluation.batches, self.config.evaluation.batches == 0

    @property
    def reserve(self) -> int:
        """Batches beyond the steps, to replace skipped ones."""
        return reserve(self.config) if self.split == "train" else 0

    def asked(self) -> int:
        """Samples that GPT-NeoX would request. The pythia order's number of epochs follows from it."""
        every = self.config.evaluation.every if self.split == "validation" else None
        return self._samples() * (self.config.training.steps // every + 1 if every else 1)

    def _samples(self) -> int:
        return self.batches.before(self.requested[0]) + self.reserve * max(self.batches.sizes)

    def build(self) -> SamplePlan | SyntheticPlan:
        steps, whole = self.requested
        if self.data.synthetic != "none":
            source = resolve_import(self.config, "data.synthetic", SOURCE, self.data.synthetic)
            if not (callable(getattr(source, "build", None)) and callable(getattr(source, "sample", None))):
                raise UserError(
                    f"data.synthetic = {self.data.synthetic!r} must have build and sample ({SampleSource.__module__})"
                )
            made = source.build(self.config, self.name or self.split)
            return SyntheticPlan(made, self.config, self.batches, steps or 1, self.targets)
        sections = self._sections()
        opened = self._open([section for _, part in sections for section in part])
        numbers = {each.identity: number for number, each in reversed(list(enumerate(opened)))}
        order = sorted(set(numbers.values()))
        place = {identity: order.index(number) for identity, number in numbers.items()}
        files = [opened[number] for number in order]
        parts, position = [], 0
        for start, part in sections:
            entries = opened[position : position + len(part)]
            position += len(part)
            members = tuple(place[each.identity] for each in entries)
            if len(set(members)) < len(members):
                raise DataError(
                    f"data.{self.split}", "a blend names one file twice", "give it once, with the sum of its weights"
                )
            parts.append((start, entries, members, self._weights(entries, whole)))
        options = self._options(files)
        sources = self._order(files, parts, whole, options)
        phases = self._planned_phases(parts, sources, whole)
        if whole:
            steps = max(1, self.batches.step(phases[-1].length))
        weighted = self.split == "train"
        parts_of_batch = self.data.epoch_parts
        return SamplePlan(phases, sources, options, self.batches, steps, self.targets, parts_of_batch, weighted)

    def _sections(self) -> list[tuple[int, list[SourceSection]]]:
        if self.split != "train":
            return [(0, self.data.train if self.data.split is not None else getattr(self.data, self.split)[self.name])]
        phases = [(0, list(self.data.train))] if self.data.train else []
        for phase in self.data.phases:
            if phase.start == 0:
                phases = []
            if phase.start < max(self.config.training.steps, 1):
                phases.append((phase.start, list(phase.sources)))
        if not phases or phases[0][0] != 0:
            raise DataError("data.train", "nothing is read from step 0 on", "give data.train, or a phase with start: 0")
        return phases

    def _open(self, sections: list[SourceSection]) -> list[SourceFile]:

        opened = [self._source(section) for section in sections]
        for each in opened:
            each.check_ids(self.config.model.vocab_size)
        refuse_unlike_tokenizers(opened, self.config.tokenizer)
        return opened

    def _source(self, section: SourceSection) -> SourceFile:
        if section.stream is None:
            return SourceFile(section, self.data.cache, self._bounds(section))
        from .stream.tokens import open_source

        return open_source(section, self.config)

    def _bounds(self, section: SourceSection) -> tuple[int, int] | None:
        from .order.order import split_bounds
        from .token_file import TokenFile

        if self.data.split is None:
            return None
        if len(self.data.train) != 1:
            raise DataError("data.split", f"cuts one training file, not {len(self.data.train)}", "give data.validation")
        bounds = split_bounds(list(self.data.split), len(TokenFile(section.path)))
        part = {"train": 0, "validation": 1, "test": 2}[self.split]
        if bounds[part] >= bounds[part + 1]:
            raise DataError("data.split", f"no document is in {self.split} (bounds {bounds})", "give it a larger share")
        return bounds[part], bounds[part + 1]

    def _weights(self, files: list[SourceFile], whole: bool) -> list[float]:
        if whole:
            return [float(each.file.tokens) for each in files]
        kind, alpha = self.data.weighting, self.data.alpha
        if kind == "neox-documents":
            return weights_by_documents([each.last - each.first for each in files], alpha)
        size = {
            "given": lambda each: 1.0,
            "documents": lambda each: each.last - each.first,
            "tokens": lambda each: each.file.tokens,
        }[kind]
        return [each.weight * float(size(each)) ** alpha for each in files]

    def _options(self, files: list[SourceFile]) -> AssemblyOptions:

        data = self.data
        fim = data.fim if data.fim.rate > 0 and self.split == "train" else None
        spans = data.span_corruption if data.span_corruption.rate > 0 and self.split == "train" else None
        packs = data.packing in ("best_fit", "unpacked")
        needed = self.targets.marks_documents or data.mask_loss_at_eod or fim or spans or packs
        eod = end_of_document(files, self.config.tokenizer) if needed else None
        if eod is None and (data.mask_loss_at_eod or packs):
            raise DataError("tokenizer.eod_id", "the end-of-document token must be known", "give it, or tokenizer.path")
        if (fim or spans) and any(each.labels or each.document_weights is not None for each in files):
            key = "data.fim" if fim else "data.span_corruption"
            rule = "documents with label files or weights of their own cannot be reordered"
            raise DataError(key, rule, f"remove labels and document_weights, or set {key}.rate: 0")
        infilling = fim and Infilling(
            fim.rate,
            fim.suffix_first_rate,
            *(
                token_ids(self.config.tokenizer, [getattr(fim, part)], f"data.fim.{part}")[0]
                for part in ("prefix", "middle", "suffix")
            ),
        )
        return AssemblyOptions(
            self.config.training.sequence_length,
            data.seed,
            eod,
            data.mask_loss_at_eod,
            self.targets.marks_documents,
            infilling or None,
            None if spans is None else self._corruption(spans),
            filler=0 if data.packing == "until_overflow" else None,
            context=self.targets.context,
            read=self.read,
        )

    def _corruption(self, section: SpanCorruptionSection) -> Corruption:

        names = [section.sentinel.replace("{}", str(number)) for number in range(section.sentinels)]
        key = "data.span_corruption.sentinel"
        ids = token_ids(self.config.tokenizer, names, key)
        if len(set(ids)) < len(ids):
            raise DataError(key, "the run's tokenizer has one id for several sentinels", "add them when training it")
        targets_only = section.loss == "targets"
        return Corruption(section.rate, section.noise_density, section.mean_span_length, ids, targets_only)

    def _order(
        self, files: list[SourceFile], parts: list, whole: bool, options: AssemblyOptions
    ) -> list[OrderedSource]:
        """Order each file. The pythia order needs the number of samples of all blends together."""
        total = [0] * len(files)
        for number, (start, _, members, weights) in enumerate(parts):
            end = self.batches.before(parts[number + 1][0]) if number + 1 < len(parts) else self.asked()
            for member, weight in zip(members, normalised_weights(weights).tolist()):
                samples = end - self.batches.before(start)
                total[member] += (
                    samples if self.data.split is not None else math.ceil(samples * weight * self.data.margin)
                )
        once = whole or self.config.training.epochs is not None
        orders = [
            each.order(self.data, self.read, None if once else wanted, 1 if once else None)
            for each, wanted in zip(files, total)
        ]
        return [
            OrderedSource(index, each, order, self.config.model.vocab_size)
            for index, (each, order) in enumerate(zip(files, orders))
        ]

    def _planned_phases(self, parts: list, sources: list[OrderedSource], whole: bool) -> list[PlannedPhase]:
        end, phases = self._samples(), list[PlannedPhase]()
        taken = [0] * len(sources)
        for number, (start, entries, members, weights) in enumerate(parts):
            first = self.batches.before(start)
            rest = max(end - first, self.batches.size(start))
            endless = any(sources[each].order.endless for each in members)
            if number + 1 < len(parts):
                length = self.batches.before(parts[number + 1][0]) - first
            elif len(parts) > 1 or (endless and not whole):
                length = rest
            else:
                length = sum(sources[each].order.length for each in members)
            drawn = length if whole or len(members) == 1 else min(length, rest)
            blend = Blend(weights, drawn, self.data.cache, as_neox=self.data.order == "pythia" and not whole)
            counts = tuple(each.counts if self.split == "train" else float(each.loss) for each in entries)
            offsets = tuple(taken[each] for each in members)
            phases.append(PlannedPhase(first, length, blend, members, counts, offsets))
            for place, each in enumerate(members):
                taken[each] += blend.drawn(place, drawn)
        return phases


_WITHOUT_FILES = ("bytes", "characters")


def refuse_unlike_tokenizers(files: list[SourceFile], section: TokenizerSection) -> None:
    """Refuse sources whose manifests name different tokenizers, or another than the run's.

    Files without a manifest (of other programs) cannot be compared."""
    known = [(each.path, each.manifest.tokenizer) for each in files if each.manifest is not None]
    for path, tokenizer in known[1:]:
        if tokenizer["hash"] != known[0][1]["hash"]:
            rule = (
                f"it was made with the tokenizer {tokenizer['name']}, but {known[0][0]} "
                f"with {known[0][1]['name']}, so their ids mean different texts"
            )
            raise DataError(path, rule, "tokenize both with one tokenizer")
    if known and is_local(section):
        own, (path, tokenizer) = build_tokenizer(section), known[0]
        if own.hash != tokenizer["hash"]:
            rule = f"it was made with the tokenizer {tokenizer['name']}, which is not the run's ({own.name})"
            raise DataError(path, rule, "set tokenizer.path to the tokenizer that made the file")


def is_local(section: TokenizerSection) -> bool:
    """Whether the run's tokenizer is on this machine. It is not downloaded only to be compared."""
    return section.type in _WITHOUT_FILES or (
        section.type != "none" and section.path is not None and Path(section.path).exists()
    )


def end_of_document(files: list[SourceFile], section: TokenizerSection) -> int | None:
    """The id of the end-of-document token: from the configuration, the manifests, or the tokenizer."""
    if section.eod_id is not None:
        return section.eod_id
    for each in files:
        if (
            section.eod_token is None
            and each.manifest is not None
            and each.manifest.tokenizer.get("eod_id") is not None
        ):
            return each.manifest.tokenizer["eod_id"]
    if section.type == "none" or (section.path is None and section.type not in _WITHOUT_FILES):
        return None
    return build_tokenizer(section).eod_id


def token_ids(section: TokenizerSection, tokens: Sequence[str], key: str) -> tuple[int, ...]:
    """The ids of special tokens of the run's tokenizer, one each.

    Raises:
        DataError: the tokenizer does not have one as a single token.
    """
    tokenizer, found = build_tokenizer(section), []
    for token in tokens:
        ids = tokenizer.encode(token)
        if len(ids) != 1:
            rule = f"the run's tokenizer has no token {token!r}"
            raise DataError(key, rule, "name one of its special tokens, or add it when training it")
        found += ids
    return tuple(found)

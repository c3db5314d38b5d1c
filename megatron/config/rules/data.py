"""What the run reads: that there is data, that its files exist, that evaluation has something to judge by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path as File

from ..arithmetic.epochs import Unread, training_tokens
from ..arithmetic.tokenizer_size import local_tokens
from ..catalog import Path, dotted
from ..file_access import MISSING, unreadable
from ..problems import Problem
from ..rule_context import RuleContext
from ..schema import Config
from ..sections.data import SourceSection

MANY_PASSES = 40  # more than any benefit was measured for (Muennighoff et al., 2023, figure 3)
ABSURD_PASSES, ABSURD_TOKENS = 1000, 10**9  # together: no study of memorisation is so large


def sources(context: RuleContext) -> Iterator[tuple[Path, SourceSection]]:
    """Every source that the configuration names, with its path."""
    data = context.config.data
    for index, source in enumerate(data.train):
        yield ("data", "train", index), source
    for kind in ("validation", "test"):
        for name, members in getattr(data, kind).items():
            for index, source in enumerate(members):
                yield ("data", kind, name, index), source
    for number, phase in enumerate(data.phases):
        for index, source in enumerate(phase.sources):
            yield ("data", "phases", number, "sources", index), source


def data_is_read_or_made(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    if data.synthetic != "none" and (data.train or data.phases):
        read = "data.train" if data.train else "data.phases"
        yield context.problem(
            "data.synthetic",
            read,
            rule="data.synthetic must be none when data are read from files",
            fix=f"remove {read}, or use data.synthetic=none",
        )


def there_is_data(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    if data.synthetic == "none" and not data.train and not data.phases:
        yield context.problem(
            "data.train",
            rule="must be given: a run needs training data",
            fix="give data.train the prefix of a .bin/.idx pair (deepy data tokenize makes one), "
            "or data.synthetic=copy for a test",
        )


def files_exist(context: RuleContext) -> Iterator[Problem]:
    for path, source in sources(context):
        for name in ("path", "labels"):
            prefix = getattr(source, name)
            if prefix is None:
                continue
            prefix = prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix
            reasons = {file: unreadable(file) for file in (prefix + ".bin", prefix + ".idx")}
            reasons = {file: reason for file, reason in reasons.items() if reason}
            if reasons:
                fix = f"check the path (it is seen from {File.cwd()}), or make the files with deepy data tokenize"
                rule = f"must exist: there is no file {' and no file '.join(reasons)}"
                if set(reasons.values()) != {MISSING}:
                    rule = "; ".join(f"{file}: {reason}" for file, reason in reasons.items())
                yield context.problem_at((*path, name), rule=rule, fix=fix)
        weights = source.document_weights
        if weights is not None and (reason := unreadable(weights)):
            yield context.problem_at(
                (*path, "document_weights"),
                rule=f"must exist: there is no file {weights}" if reason == MISSING else f"{weights}: {reason}",
                fix=f"check the path (it is seen from {File.cwd()}), or write the file with numpy.save",
            )


def blends_of(config: Config) -> Iterator[tuple[str, Sequence[SourceSection], int]]:
    """The key of each blend that training reads, its sources, and its steps."""
    data, end = config.data, config.training.steps
    starts = [phase.start for phase in data.phases]
    if data.train:
        yield "data.train", data.train, min([end, *starts])
    for number, (phase, last) in enumerate(zip(data.phases, [*starts[1:], end])):
        yield f"data.phases.{number}.sources", phase.sources, max(min(last, end) - phase.start, 0)


def passes_over(config: Config, sources: Sequence[SourceSection], steps: int) -> tuple[float, int, int] | None:
    """Passes over the source of a blend that is read most often, tokens of the blend that are read, and that it has;
    None where a file cannot be read or the batch is not known.
    """
    data, training = config.data, config.training
    if training.global_batch_size is None:
        return None
    try:
        sizes = [training_tokens(source.path, data.split) for source in sources]
    except Unread:
        return None
    read = steps * training.global_batch_size * training.sequence_length
    shares = [source.weight for source in sources] if data.weighting == "given" else sizes
    passes = [read * share / max(sum(shares), 1e-9) / max(size, 1) for share, size in zip(shares, sizes)]
    return max(passes), read, sum(sizes)


def data_suffice(context: RuleContext) -> Iterator[Problem]:
    for key, sources, steps in blends_of(context.config):
        passes, read, there = passes_over(context.config, sources, steps) or (0.0, 0, 0)
        if passes <= MANY_PASSES:
            continue
        absurd = passes > ABSURD_PASSES and read > ABSURD_TOKENS
        most = "" if len(sources) == 1 else " over the source that is read most often"
        yield context.problem(
            "training.steps",
            key,
            "training.global_batch_size",
            rule=f"{read:,} tokens {'must not be' if absurd else 'are'} {passes:,.0f} passes{most}: {key} has "
            f"{there:,} tokens"
            + ("" if absurd else ", and little is learned after 4 passes (Muennighoff et al., 2023)"),
            fix=f"give more data, or at most {max(int(steps * 4 / passes), 1):,} steps for 4 passes",
            fatal=absurd,
        )


def weights_are_for_training(context: RuleContext) -> Iterator[Problem]:
    for path, source in sources(context):
        for name, given in (
            ("loss_weight", source.loss_weight != 1.0),
            ("document_weights", source.document_weights is not None),
        ):
            if given and path[1] not in ("train", "phases"):
                yield context.problem_at(
                    (*path, name),
                    rule="must be left out here: an evaluation weighs all labels alike",
                    fix=f"remove {name}, or make sets of what is to be judged apart",
                )


def pythia_seed_fits(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    if data.order == "pythia" and data.synthetic == "none" and data.seed >= 2**32:
        yield context.problem(
            "data.seed",
            "data.order",
            rule="the seed of GPT-NeoX's shuffle must be below 2**32",
            fix="use a smaller seed, or data.order=stream",
        )


def some_source_counts(context: RuleContext) -> Iterator[Problem]:
    """In each blend by itself: a phase in which nothing counts would pass without an update."""
    data = context.config.data
    blends: list[tuple[Path, Sequence[SourceSection]]]
    blends = [(("data", "train"), data.train if not data.phases or data.phases[0].start > 0 else [])]
    blends += [(("data", "phases", index, "sources"), phase.sources) for index, phase in enumerate(data.phases)]
    blends += [(("data", "validation", name), each) for name, each in data.validation.items()]
    blends += [(("data", "test", name), each) for name, each in data.test.items()]
    for path, entries in blends:
        if entries and not any(each.loss and each.loss_weight for each in entries):
            yield context.problem_at(
                (*path, 0, "loss_weight" if entries[0].loss else "loss"),
                rule="at least one source must count in the loss",
                fix="give one of the sources loss: true and a loss_weight above 0",
            )


def alpha_needs_a_weighting(context: RuleContext) -> Iterator[Problem]:
    if context.config.data.weighting == "given" and context.config.data.alpha != 1.0:
        yield context.warning(
            "data.alpha",
            "data.weighting",
            rule="alpha must go with data.weighting: documents, tokens or neox-documents",
            fix="give data.weighting, or remove it",
        )


def infilling_has_its_tokens(context: RuleContext) -> Iterator[Problem]:
    if context.config.data.fim.rate > 0 and no_tokenizer(context):
        yield context.problem(
            "data.fim.rate",
            "tokenizer.type",
            "tokenizer.path",
            rule="fill-in-the-middle must have a tokenizer with its special tokens",
            fix="give tokenizer.path, or data.fim.rate=0",
        )


def split_cuts_one_source(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    if data.split is None:
        return
    if not 1 <= len(data.split) <= 3 or min(data.split) < 0 or data.split[0] <= 0:
        yield context.problem(
            "data.split",
            rule="split must be the shares of training, validation and test: one to three numbers of at least 0, "
            "the first above 0",
            fix="for example [969, 30, 1]",
        )
    if len(data.train) > 1:
        yield context.problem(
            "data.split",
            "data.train",
            rule="split must have exactly one training source, whose documents it divides",
            fix="give data.validation its own files, or keep one source",
        )
    if data.phases:
        yield context.problem(
            "data.split",
            "data.phases",
            rule="split must not go with phases: it divides one training source",
            fix="give data.validation its own files",
        )
    for name, share in (("validation", 1), ("test", 2)):
        if getattr(data, name) and len(data.split) > share and data.split[share] > 0:
            yield context.problem(
                "data.split",
                f"data.{name}",
                rule=f"{name} data must come from split or from data.{name}, not both",
                fix=f"use 0 as the share of {name}, or remove data.{name}",
            )


def phases_follow_each_other(context: RuleContext) -> Iterator[Problem]:
    phases, steps = context.config.data.phases, context.config.training.steps
    for index, (before, after) in enumerate(zip(phases, phases[1:]), 1):
        if after.start <= before.start:
            yield context.problem_at(
                ("data", "phases", index, "start"),
                rule=f"must be above the start of the phase before, {before.start}",
                fix=f"use more than {before.start}",
            )
    for index, phase in enumerate(phases):
        if phase.start >= steps > 0:
            yield context.problem_at(
                ("data", "phases", index, "start"),
                "training.steps",
                fatal=False,
                rule="must be below training.steps: the run ends before this phase",
                fix=f"use a start below {steps}, or remove the phase",
            )
    if phases and phases[0].start > 0 and not context.config.data.train:
        yield context.problem_at(
            ("data", "phases", 0, "start"),
            "data.train",
            rule="the first phase must start at step 0, unless data.train is given",
            fix="let the first phase start at 0, or give data.train",
        )


def evaluation_has_data(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    split = config.data.split
    has_split = split is not None and len(split) > 1 and split[1] > 0
    if (
        config.evaluation.every is not None
        and not config.data.validation
        and not has_split
        and config.data.synthetic == "none"
    ):
        yield context.problem(
            "evaluation.every",
            "data.validation",
            rule="evaluation must have validation data",
            fix="give data.validation, or a share of validation in data.split, or remove evaluation.every",
        )


def named_sets_have_sources(context: RuleContext) -> Iterator[Problem]:
    for kind in ("validation", "test"):
        for name, members in getattr(context.config.data, kind).items():
            if not members:
                yield context.problem_at(
                    ("data", kind, name),
                    rule="a named set must have at least one source",
                    fix="give it a path, or remove it",
                )


def no_tokenizer(context: RuleContext) -> bool:
    """Whether there is nothing that could turn text into tokens."""
    tokenizer = context.config.tokenizer
    return tokenizer.type == "none" or (tokenizer.path is None and tokenizer.type not in ("bytes", "characters"))


def end_of_document_is_known(context: RuleContext) -> Iterator[Problem]:
    data, tokenizer = context.config.data, context.config.tokenizer
    unknown = tokenizer.eod_id is None and no_tokenizer(context)
    for name in ("reset_attention_at_eod", "mask_loss_at_eod"):
        if getattr(data, name) and unknown:
            yield context.problem(
                f"data.{name}",
                "tokenizer.path",
                "tokenizer.eod_id",
                rule="the end-of-document token must be known",
                fix="give tokenizer.eod_id, or tokenizer.path",
            )
            return


def tokenizer_exists(context: RuleContext) -> Iterator[Problem]:
    tokenizer = context.config.tokenizer
    local = tokenizer.path is not None and (
        tokenizer.path.startswith(("/", "./", "../", "~"))
        or tokenizer.path.count("/") > 1
        or tokenizer.path.endswith((".json", ".model", ".tiktoken"))
    )
    needs_file = tokenizer.type in ("sentencepiece", "gpt2")
    if tokenizer.path is not None and (local or needs_file) and not File(tokenizer.path).exists():
        yield context.problem(
            "tokenizer.path",
            rule=f"must be a file that exists; there is no file {tokenizer.path}",
            fix=f"check the path (it is seen from {File.cwd()}), or make one with deepy data train-tokenizer",
        )
    if tokenizer.merges is not None and not File(tokenizer.merges).is_file():
        yield context.problem(
            "tokenizer.merges",
            rule=f"must be a file that exists; there is no file {tokenizer.merges}",
            fix=f"check the path; it is seen from {File.cwd()}",
        )


def samples_can_be_written(context: RuleContext) -> Iterator[Problem]:
    samples = context.config.evaluation.samples
    if samples.every is None:
        return
    if not samples.prompts:
        yield context.problem(
            "evaluation.samples.prompts",
            "evaluation.samples.every",
            rule="samples must have a prompt to continue",
            fix="give evaluation.samples.prompts, or remove evaluation.samples.every",
        )
    if no_tokenizer(context):
        yield context.problem(
            "evaluation.samples.every",
            "tokenizer.type",
            "tokenizer.path",
            rule="samples must have a tokenizer to be shown as text",
            fix="give tokenizer.path, or remove evaluation.samples.every",
        )


def _file(prefix: str) -> str:
    """The file that a prefix means, however it is written."""
    return os.path.abspath(prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix)


def a_blend_names_a_file_once(context: RuleContext) -> Iterator[Problem]:
    blends: dict[Path, dict[str, Path]] = {}
    for path, source in sources(context):
        earlier = blends.setdefault(path[:-1], {}).setdefault(_file(source.path), path)
        if earlier != path:
            yield context.problem_at(
                (*path, "path"),
                dotted((*earlier, "path")),
                rule="a blend must name each file only once",
                fix="keep one of them, with the sum of their weights",
            )


def a_file_has_one_label_file(context: RuleContext) -> Iterator[Problem]:
    """In all phases: a source goes on where an earlier phase stopped, as the same source."""
    first: dict[str, tuple[Path, SourceSection]] = {}
    for path, source in sources(context):
        if path[1] not in ("train", "phases"):
            continue
        earlier, known = first.setdefault(_file(source.path), (path, source))
        if (known.labels and _file(known.labels)) != (source.labels and _file(source.labels)):
            yield context.problem_at(
                (*path, "labels"),
                dotted((*earlier, "labels")),
                rule=f"{source.path} must have the same label file in all phases",
                fix="give both the same labels, or tokenize the text into a second file",
            )
        if _weights_file(known) != _weights_file(source):
            yield context.problem_at(
                (*path, "document_weights"),
                dotted((*earlier, "document_weights")),
                rule=f"{source.path} must have the same document_weights in all phases",
                fix="give both the same file; loss_weight may differ",
            )


def _weights_file(source: SourceSection) -> str | None:
    return None if source.document_weights is None else os.path.abspath(source.document_weights)


def infilling_has_no_labels(context: RuleContext) -> Iterator[Problem]:
    for path, source in sources(context):
        if not context.config.data.fim.rate > 0 or path[1] not in ("train", "phases"):
            continue
        if source.labels:
            yield context.problem_at(
                (*path, "labels"),
                "data.fim.rate",
                rule="must not go with fill-in-the-middle, which reorders documents but not their label file",
                fix="remove labels, or use data.fim.rate=0",
            )
        if source.document_weights:
            yield context.problem_at(
                (*path, "document_weights"),
                "data.fim.rate",
                rule="must not go with fill-in-the-middle, which moves the ends of documents",
                fix="remove document_weights (loss_weight may stay), or use data.fim.rate=0",
            )


def infilling_tokens_exist(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    known = local_tokens(context.config.tokenizer.model_dump()) if data.fim.rate > 0 else None
    for name in ("prefix", "middle", "suffix"):
        token = getattr(data.fim, name)
        if known is not None and token not in known:
            yield context.problem(
                f"data.fim.{name}",
                "tokenizer.path",
                rule=f"must be a token of the tokenizer, which has no token {token!r}",
                fix=f"name one of its special tokens, or train it with --special {token!r}",
            )


def packing_has_its_order(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    if data.packing == "best_fit" and data.order == "pythia" and data.synthetic == "none":
        yield context.problem(
            "data.packing",
            "data.order",
            rule="best_fit must not go with the pythia order, which splits documents",
            fix="use data.order: stream (shuffled) or sequential",
        )
    if data.packing == "until_overflow" and data.order != "pythia" and data.synthetic == "none":
        yield context.problem(
            "data.packing",
            "data.order",
            rule="until_overflow must go with the pythia order, of which it is a part",
            fix="use data.order: pythia, or packing: best_fit",
        )
    if data.drop_long and data.packing != "until_overflow":
        yield context.problem(
            "data.drop_long",
            "data.packing",
            rule="must go with data.packing: until_overflow",
            fix="use data.packing=until_overflow, or drop_long=false",
        )


INPUT_RULES = (
    there_is_data,
    files_exist,
    data_suffice,
    infilling_has_its_tokens,
    infilling_tokens_exist,
    evaluation_has_data,
    end_of_document_is_known,
    tokenizer_exists,
    samples_can_be_written,
)

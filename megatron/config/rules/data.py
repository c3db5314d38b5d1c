"""The data that the run reads: sources, files, tokens, span corruption, and data to evaluate with."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path as File

from ..arithmetic.batches import Unread, batches_of, training_tokens
from ..arithmetic.tokenizer_size import local_tokens
from ..file_access import MISSING, unreadable
from ..problems import Problem
from ..rule_context import Check, RuleContext, check_order
from ..schema import Config, Path, dotted
from ..sections.data import SourceSection

MANY_PASSES = 40  # more than any benefit was measured for (Muennighoff et al., 2023, figure 3)
ABSURD_PASSES, ABSURD_TOKENS = 1000, 10**9  # together: no study of memorisation is so large
RATES = {"data.fim.rate": "fill-in-the-middle", "data.span_corruption.rate": "span corruption"}


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


def _training_sources(context: RuleContext) -> Iterator[tuple[Path, SourceSection]]:
    return ((path, source) for path, source in sources(context) if path[1] in ("train", "phases"))


def files_exist(context: RuleContext) -> Iterator[Problem]:
    seen = f"check the path (it is seen from {File.cwd()}), or"
    for path, source in sources(context):
        for name in ("path", "labels"):
            prefix = getattr(source, name)
            if prefix is None or (name == "path" and source.stream is not None):
                continue
            prefix = prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix
            reasons = {file: unreadable(file) for file in (prefix + ".bin", prefix + ".idx")}
            reasons = {file: reason for file, reason in reasons.items() if reason}
            if reasons:
                rule = f"must exist: there is no file {' and no file '.join(reasons)}"
                if set(reasons.values()) != {MISSING}:
                    rule = ", and ".join(f"{file}: {reason}" for file, reason in reasons.items())
                fix = f"{seen} make the files with deepy data tokenize"
                yield context.problem_at((*path, name), rule=rule, fix=fix)
        weights = source.document_weights
        if weights is not None and (reason := unreadable(weights)):
            rule = f"must exist: there is no file {weights}" if reason == MISSING else f"{weights}: {reason}"
            fix = f"{seen} write the file with numpy.save"
            yield context.problem_at((*path, "document_weights"), rule=rule, fix=fix)


def blends_of(config: Config) -> Iterator[tuple[str, Sequence[SourceSection], range]]:
    """The key of each blend that training reads, its sources, and its steps."""
    data, end = config.data, config.training.steps
    starts = [phase.start for phase in data.phases]
    if data.train:
        yield "data.train", data.train, range(min([end, *starts]))
    for number, (phase, last) in enumerate(zip(data.phases, [*starts[1:], end])):
        yield f"data.phases.{number}.sources", phase.sources, range(phase.start, min(last, end))


def passes_over(config: Config, sources: Sequence[SourceSection], steps: range) -> tuple[float, int, int] | None:
    """Passes over the source of a blend that is read most often, tokens of the blend that are read, and all its tokens.

    None where a file cannot be read or the batch is not known."""
    data, training = config.data, config.training
    if training.global_batch_size is None:
        return None
    try:
        sizes = [training_tokens(source.path or "", data.split) for source in sources]
    except Unread:
        return None
    before = batches_of(config).before
    read = (before(max(steps.stop, steps.start)) - before(steps.start)) * training.sequence_length
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
            f"training.steps {key} training.global_batch_size",
            rule=f"{read:,} tokens {'must not be' if absurd else 'are'} {passes:,.0f} passes{most}: {key} has "
            f"{there:,} tokens"
            + ("" if absurd else ", and little is learned after 4 passes (Muennighoff et al., 2023)"),
            fix=f"give more data, or at most {max(int(len(steps) * 4 / passes), 1):,} steps for 4 passes",
            fatal=absurd,
        )


def weights_are_for_training(context: RuleContext) -> Iterator[Problem]:
    for path, source in sources(context):
        given = {"loss_weight": source.loss_weight != 1.0, "document_weights": source.document_weights is not None}
        for name in (name for name, there in given.items() if there and path[1] in ("validation", "test")):
            yield context.problem_at(
                (*path, name),
                rule="must be absent here: an evaluation weighs all labels alike",
                fix=f"remove {name}, or make separate sets",
            )


def some_source_counts(context: RuleContext) -> Iterator[Problem]:
    """In each blend by itself: a phase in which nothing counts would pass without an update."""
    phases = context.config.data.phases
    unread = ("data", "train") if phases and phases[0].start <= 0 else None
    for path, found in groupby(sources(context), lambda each: each[0][:-1]):
        entries = [source for _, source in found]
        if path != unread and not any(each.loss and each.loss_weight for each in entries):
            yield context.problem_at(
                (*path, 0, "loss_weight" if entries[0].loss else "loss"),
                rule="at least one source must count in the loss",
                fix="give one of the sources loss: true and a loss_weight above 0",
            )


def no_tokenizer(context: RuleContext) -> bool:
    """Whether nothing could turn text into tokens."""
    tokenizer = context.config.tokenizer
    return tokenizer.type == "none" or (tokenizer.path is None and tokenizer.type not in ("bytes", "characters"))


def special_tokens_have_a_tokenizer(context: RuleContext) -> Iterator[Problem]:
    for key, what in RATES.items():
        if context.value(key) > 0 and no_tokenizer(context):
            rule = f"{what} must have a tokenizer with its special tokens"
            fix = f"give tokenizer.path, or {key}=0"
            yield context.problem(f"{key} tokenizer.type tokenizer.path", rule=rule, fix=fix)


def infilling_tokens_exist(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    known = local_tokens(context.config.tokenizer.model_dump()) if data.fim.rate > 0 else None
    for name in ("prefix", "middle", "suffix"):
        token = getattr(data.fim, name)
        if known is not None and token not in known:
            yield context.problem(
                f"data.fim.{name} tokenizer.path",
                rule=f"must be a token of the tokenizer, which has no token {token!r}",
                fix=f"name one of its special tokens, or train it with --special {token!r}",
            )


def reordered_documents_have_no_labels(context: RuleContext) -> Iterator[Problem]:
    """Files with a number per token or per document do not follow documents that a run changes."""
    for key, what in RATES.items():
        for path, source in _training_sources(context) if context.value(key) > 0 else ():
            for name, reason, fix in (
                ("labels", "reorders documents but not their label file", "remove labels"),
                ("document_weights", "moves the ends of documents", "remove document_weights (loss_weight may stay)"),
            ):
                if getattr(source, name):
                    rule = f"must not go with {what}, which {reason}"
                    yield context.problem_at((*path, name), key, rule=rule, fix=f"{fix}, or use {key}=0")


def split_divides_one_source(context: RuleContext) -> Iterator[Problem]:
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
    for name, share in (("validation", 1), ("test", 2)):
        if getattr(data, name) and len(data.split) > share and data.split[share] > 0:
            yield context.problem(
                f"data.split data.{name}",
                rule=f"{name} data must come from split or from data.{name}, not both",
                fix=f"use 0 as the share of {name}, or remove data.{name}",
            )


def phases_follow_each_other(context: RuleContext) -> Iterator[Problem]:
    phases, steps, path = context.config.data.phases, context.config.training.steps, ("data", "phases")
    yield from check_order(context, path, "start", phases, "start of the phase")
    for index, phase in enumerate(phases):
        if phase.start >= steps > 0:
            yield context.problem_at(
                (*path, index, "start"),
                "training.steps",
                fatal=False,
                rule="must be below training.steps: the run ends before this phase",
                fix=f"use a start below {steps}, or remove the phase",
            )


def named_sets_have_sources(context: RuleContext) -> Iterator[Problem]:
    for kind in ("validation", "test"):
        for name, members in getattr(context.config.data, kind).items():
            if not members:
                rule, fix = "a named set must have at least one source", "give it a path, or remove it"
                yield context.problem_at(("data", kind, name), rule=rule, fix=fix)


def end_of_document_is_known(context: RuleContext) -> Iterator[Problem]:
    data, tokenizer = context.config.data, context.config.tokenizer
    asked = [name for name in ("reset_attention_at_eod", "mask_loss_at_eod") if getattr(data, name)]
    if asked and tokenizer.eod_id is None and no_tokenizer(context):
        yield context.problem(
            f"data.{asked[0]} tokenizer.path tokenizer.eod_id",
            rule="the end-of-document token must be known",
            fix="give tokenizer.eod_id, or tokenizer.path",
        )


def tokenizer_exists(context: RuleContext) -> Iterator[Problem]:
    tokenizer = context.config.tokenizer
    local = tokenizer.path is not None and (
        tokenizer.path.startswith(("/", "./", "../", "~"))
        or tokenizer.path.count("/") > 1
        or tokenizer.path.endswith((".json", ".model", ".tiktoken"))
    )
    needs_file = tokenizer.type in ("sentencepiece", "gpt2")
    seen = f"check the path (it is seen from {File.cwd()})"
    if tokenizer.path is not None and (local or needs_file) and not File(tokenizer.path).exists():
        rule = f"must be a file that exists, and there is no file {tokenizer.path}"
        yield context.problem("tokenizer.path", rule=rule, fix=f"{seen}, or make one with deepy data train-tokenizer")
    if tokenizer.merges is not None and not File(tokenizer.merges).is_file():
        rule = f"must be a file that exists, and there is no file {tokenizer.merges}"
        yield context.problem("tokenizer.merges", rule=rule, fix=seen)


def samples_can_be_written(context: RuleContext) -> Iterator[Problem]:
    key, samples = "evaluation.samples.every", context.config.evaluation.samples
    if samples.every is not None and not samples.prompts:
        rule, fix = "samples must have a prompt to continue", f"give evaluation.samples.prompts, or remove {key}"
        yield context.problem(f"evaluation.samples.prompts {key}", rule=rule, fix=fix)
    if samples.every is not None and no_tokenizer(context):
        rule, fix = "samples must have a tokenizer to be shown as text", f"give tokenizer.path, or remove {key}"
        yield context.problem(f"{key} tokenizer.type tokenizer.path", rule=rule, fix=fix)


def _file(prefix: str | None) -> str | None:
    if prefix is None:
        return None
    return os.path.abspath(prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix)


def a_blend_names_a_file_once(context: RuleContext) -> Iterator[Problem]:
    blends: dict[Path, dict[str | None, Path]] = {}
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
    """In all phases: a source continues where an earlier phase stopped, as the same source."""
    first: dict[str | None, tuple[Path, SourceSection]] = {}
    for path, source in _training_sources(context):
        earlier, known = first.setdefault(_file(source.path), (path, source))
        for name, what, fix in (
            ("labels", "label file", "give both the same labels, or tokenize the text into a second file"),
            ("document_weights", "document_weights", "give both the same file. Only loss_weight may differ"),
        ):
            if _file(getattr(known, name)) != _file(getattr(source, name)):
                rule = f"{source.path} must have the same {what} in all phases"
                yield context.problem_at((*path, name), dotted((*earlier, name)), rule=rule, fix=fix)


def _evaluates_without_data(config: Config) -> bool:
    data = config.data
    split = data.split is not None and len(data.split) > 1 and data.split[1] > 0
    return config.evaluation.every is not None and not data.validation and not split and data.synthetic == "none"


RATE, SENTINEL = "data.span_corruption.rate", "data.span_corruption.sentinel"


def _corrupts(config: Config) -> bool:
    return config.data.span_corruption.rate > 0


def sentinels_exist(context: RuleContext) -> Iterator[Problem]:
    options = context.config.data.span_corruption
    known = local_tokens(context.config.tokenizer.model_dump()) if _corrupts(context.config) else None
    if known is None or options.sentinel.count("{}") != 1:
        return
    names = (options.sentinel.replace("{}", str(number)) for number in range(options.sentinels))
    missing = next((number for number, name in enumerate(names) if name not in known), None)
    if missing is not None:
        name = options.sentinel.replace("{}", str(missing))
        yield context.problem(
            f"{SENTINEL} data.span_corruption.sentinels tokenizer.path",
            rule=f"must be a token of the tokenizer for each span, and it has no token {name!r}",
            fix=f"use sentinels: {missing}" if missing else f"name its sentinels, or train it with --special {name!r}",
        )


def _has_other_braces(config: Config) -> bool:
    sentinel = config.data.span_corruption.sentinel
    return sentinel.count("{}") != 1 or bool(set("{}") & set(sentinel.replace("{}", "")))


CHECKS = (
    Check(
        lambda c: f"data.synthetic {'data.train' if c.data.train else 'data.phases'}",
        lambda c: c.data.synthetic != "none" and (c.data.train or c.data.phases),
        "data.synthetic must be none when data are read from files",
        lambda c: f"remove {'data.train' if c.data.train else 'data.phases'}, or use data.synthetic=none",
    ),
    Check(
        "data.seed data.order",
        lambda c: c.data.order == "pythia" and c.data.synthetic == "none" and c.data.seed >= 2**32,
        "the seed of GPT-NeoX's shuffle must be below 2**32",
        "use a smaller seed, or data.order=stream",
    ),
    Check(
        "data.alpha data.weighting",
        lambda c: c.data.weighting == "given" and c.data.alpha != 1.0,
        "alpha must go with data.weighting: documents, tokens or neox-documents",
        "give data.weighting, or remove it",
        fatal=False,
    ),
    Check(
        "data.split data.train",
        lambda c: c.data.split is not None and len(c.data.train) > 1,
        "split must have exactly one training source, whose documents it divides",
        "give data.validation its own files, or keep one source",
    ),
    Check(
        "data.split data.phases",
        lambda c: c.data.split is not None and c.data.phases,
        "split must not go with phases: it divides one training source",
        "give data.validation its own files",
    ),
    Check(
        "data.phases.0.start data.train",
        lambda c: c.data.phases and c.data.phases[0].start > 0 and not c.data.train,
        "the first phase must start at step 0, unless data.train is given",
        "let the first phase start at 0, or give data.train",
    ),
    Check(
        "data.packing data.order",
        lambda c: (
            c.data.packing in ("best_fit", "unpacked")
            and c.data.order in ("pythia", "window")
            and c.data.synthetic == "none"
        ),
        lambda c: f"{c.data.packing} must not go with the {c.data.order} order, which splits documents",
        "use data.order: stream (shuffled) or sequential",
    ),
    Check(
        "data.packing data.order",
        lambda c: c.data.packing == "until_overflow" and c.data.order != "pythia" and c.data.synthetic == "none",
        "until_overflow must go with the pythia order, since it is a part of it",
        "use data.order: pythia, or packing: best_fit",
    ),
    Check(
        "data.drop_long data.packing",
        lambda c: c.data.drop_long and c.data.packing not in ("until_overflow", "unpacked"),
        "must go with data.packing: until_overflow or unpacked",
        "use data.packing=until_overflow, or drop_long=false",
    ),
    Check(
        f"{RATE} data.synthetic",
        lambda c: _corrupts(c) and c.data.synthetic != "none",
        "span corruption must have token files: synthetic samples have no documents",
        f"give data.train and data.synthetic=none, or {RATE}=0",
    ),
    Check(
        f"{RATE} data.fim.rate",
        lambda c: _corrupts(c) and c.data.fim.rate > 0,
        "span corruption must not go with fill-in-the-middle: both reorder documents",
        f"use {RATE}=0 or data.fim.rate=0",
    ),
    Check(
        f"{RATE} training.sequence_schedule",
        lambda c: _corrupts(c) and c.training.sequence_schedule,
        "span corruption must have whole samples: a shorter stage would cut texts from their spans",
        f"use {RATE}=0, or a run of its own for each length",
    ),
    Check(
        f"training.sequence_length {RATE}",
        lambda c: _corrupts(c) and c.training.sequence_length < 3,
        "must be at least 3 with span corruption: two tokens become four",
        "use a longer one",
    ),
    Check(
        SENTINEL,
        _has_other_braces,
        "must have {} once, for the number of the span, and no other brace",
        "write it as in <extra_id_{}>",
    ),
)


INPUT_RULES = (
    Check(
        "data.train",
        lambda c: c.data.synthetic == "none" and not c.data.train and not c.data.phases,
        "must be given: a run needs training data",
        "give data.train the prefix of a .bin/.idx pair (deepy data tokenize makes one), or data.synthetic=copy for a "
        "test",
    ),
    files_exist,
    data_suffice,
    special_tokens_have_a_tokenizer,
    infilling_tokens_exist,
    Check(
        "evaluation.every data.validation",
        _evaluates_without_data,
        "evaluation must have validation data",
        "give data.validation, or a share of validation in data.split, or remove evaluation.every",
    ),
    end_of_document_is_known,
    tokenizer_exists,
    samples_can_be_written,
    sentinels_exist,
)

"""Training from a stream of texts: its files, its tokenizer, and options that need all tokens before the start."""

import os
from collections.abc import Iterator
from pathlib import Path as File

from ..arithmetic.machine import why_not_writable
from ..arithmetic.shards import ShardError, has_secret, is_url, list_shards
from ..problems import ABSENT, Problem
from ..rule_context import RuleContext
from ..schema import Path, dotted
from ..sections.data import SourceSection
from .data import no_tokenizer, sources
from .output import protocol_problem

FEW = 5  # names of skipped files that a warning shows


def _streams(context: RuleContext) -> Iterator[tuple[Path, SourceSection, str]]:
    """Without those whose URL must not be shown."""
    found = ((path, source, source.stream) for path, source in sources(context) if source.stream is not None)
    return (each for each in found if not has_secret(each[2]))


def streams_have_no_secrets(context: RuleContext) -> Iterator[Problem]:
    for path, source in sources(context):
        if source.stream is not None and has_secret(source.stream):
            place = (*path, "stream")
            rule = "must not have a password, key or signature: the configuration is kept with the run and in the logs"
            fix = "give the URL without it, and the credentials as the store's package reads them (a file, variables)"
            yield Problem(dotted(place), rule, fix, where=str(context.origin(place)).partition("=")[0])


def sources_have_a_path(context: RuleContext) -> Iterator[Problem]:
    for path, source in sources(context):
        if source.path is None and source.stream is None:
            rule = f"{dotted((*path, 'path'))} is required: a source must have a token file, or a stream of texts"
            fix = "give path, the prefix of a .bin/.idx pair, or stream, a folder of texts"
            yield Problem(dotted((*path, "path")), rule, fix, ABSENT, str(context.origin(path)))
        for name in ("tokenizer", "shards"):
            if source.stream is None and getattr(source, name) is not None:
                rule, fix = "must go with stream", f"remove {name}, or give stream, a folder of texts"
                yield context.problem_at((*path, name), rule=rule, fix=fix)


def streams_can_be_ordered(context: RuleContext) -> Iterator[Problem]:
    """A stream's tokens are not counted before the start, so nothing may depend on their number."""
    data, training = context.config.data, context.config.training
    counted = {
        "data.order": (data.order != "window", "must be window", "use data.order=window"),
        "data.packing": (data.packing != "continuous", "must be continuous", "use data.packing=continuous"),
        "data.weighting": (data.weighting != "given", "must be given", "use data.weighting=given with a weight each"),
        "data.split": (data.split is not None, "must be absent", "give data.validation its own token file"),
        "training.epochs": (training.epochs is not None, "must be absent", "give training.steps instead"),
        "evaluation.breakdown": (
            "frequency" in context.config.evaluation.breakdown,
            "must not have frequency",
            "remove it, or tokenize the texts before",
        ),
    }
    for path, _, _ in _streams(context):
        if path[1] in ("train", "phases"):
            for name, (broken, rule, fix) in counted.items():
                if broken:
                    rule += " with a stream, whose documents are counted while the run trains"
                    yield context.problem(name, dotted((*path, "stream")), rule=rule, fix=fix)
            return


def streams_are_for_training(context: RuleContext) -> Iterator[Problem]:
    made = {os.path.abspath(source.path): path for path, source, _ in _streams(context) if source.path}
    for path, source in sources(context):
        if path[1] in ("train", "phases"):
            continue
        if source.stream is not None and not has_secret(source.stream):
            rule = "must be absent here: an evaluation reads the same samples each time, from a token file"
            fix = "make one of other texts with deepy data tokenize, and give its path"
            yield context.problem_at((*path, "stream"), rule=rule, fix=fix)
        elif source.path is not None and (trained := made.get(os.path.abspath(source.path))):
            rule = "must not be the token file of a stream that the run trains on"
            fix = "make one of other texts with deepy data tokenize"
            yield context.problem_at((*path, "path"), dotted((*trained, "stream")), rule=rule, fix=fix)


def streams_have_plain_sources(context: RuleContext) -> Iterator[Problem]:
    for path, source, stream in _streams(context):
        for name in ("labels", "document_weights"):
            if getattr(source, name) is not None:
                rule = "must not go with stream: it has a number for each token or document, which are not known yet"
                yield context.problem_at((*path, name), rule=rule, fix=f"remove {name}, or tokenize the texts before")
        inside = os.path.abspath(source.path or "").startswith(os.path.abspath(stream) + os.sep)
        if source.path and not is_url(stream) and inside:
            rule = f"must not be inside {stream}: the token file would be one of the texts"
            yield context.problem_at((*path, "path"), rule=rule, fix="give path another folder")


def streams_have_a_tokenizer(context: RuleContext) -> Iterator[Problem]:
    for path, source, _ in _streams(context):
        own, kind = source.tokenizer, context.config.tokenizer.type
        if kind == "none" or (own is None and no_tokenizer(context)):
            rule, fix = "must have a tokenizer for its texts", "give tokenizer.path, or tokenizer in the source"
            yield context.problem_at((*path, "stream"), "tokenizer.type", "tokenizer.path", rule=rule, fix=fix)
        elif own is not None and own.endswith((".json", ".model")) and not File(own).exists():
            rule = f"must be a file that exists, and there is no file {own}"
            fix = f"check the path (it is seen from {File.cwd()})"
            yield context.problem_at((*path, "tokenizer"), rule=rule, fix=fix)


def streams_can_be_read(context: RuleContext) -> Iterator[Problem]:
    for path, source, stream in _streams(context):
        place = (*path, "stream")
        if is_url(stream) and (found := protocol_problem(stream)):
            yield context.problem_at(place, rule=found[0], fix=found[1])
            continue
        try:
            _, skipped = list_shards(stream)
        except ShardError as error:
            yield context.problem_at(place, rule=error.rule, fix=error.fix)
            continue
        if skipped:
            names = ", ".join(repr(each)[1:-1] for each in skipped[:FEW]) + (", ..." if len(skipped) > FEW else "")
            rule = f"must have only files of texts: {len(skipped)} are not read, by their endings ({names})"
            fix = "rename or extract them, if they are texts"
            yield context.problem_at(place, rule=rule, fix=fix, fatal=False)
        if context.starts_here and source.path and (reason := why_not_writable(os.path.dirname(source.path) or ".")):
            yield context.problem_at((*path, "path"), rule=f"must be in a writable folder: {reason}", fix="give path")


INPUT_RULES = (streams_have_a_tokenizer, streams_can_be_read)

"""Data of the run: token files, their order and blend, and the tokenizer."""

import contextlib
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, Literal

from ..arithmetic.shards import ShardError, describe_shards, list_shards
from ..registry import SOURCE
from ..section import Derivable, Derived, Section, key, same_as


def _source_name(own: dict[str, Any], at: Any) -> str:
    last = PurePath(own["stream"] or own["path"] or "").name
    return last[:-4] if last.endswith((".bin", ".idx")) else last


def _prefix(own: dict[str, Any], at: Any) -> str | None:
    if own["stream"] is None:
        return None
    return f"{at['data.cache']}/streams/{_source_name(own, at)}-{blake2b(own['stream'].encode()).hexdigest()[:8]}"


def _shards(own: dict[str, Any], at: Any) -> str | None:
    with contextlib.suppress(ShardError):
        return None if own["stream"] is None else describe_shards(list_shards(own["stream"])[0])
    return None


class SourceSection(Section):
    path: Derivable[str] = key(
        None,
        "Prefix of a .bin/.idx pair (with or without the ending). Required without `stream`, whose tokens become such "
        "a pair there.",
        derived=Derived("of a stream: a name below data.cache", _prefix, (".stream", "data.cache")),
    )
    stream: str | None = key(
        None, "Folder, file or URL (s3://..., hf://...) of texts, tokenised while the run trains (docs/data.md)."
    )
    tokenizer: str | None = key(None, "Path or name of a stream's tokenizer (tokenizer.type). Default: tokenizer.path.")
    shards: Derivable[str] = key(
        None,
        "State of the stream's files, which the order depends on. A run whose files have another one does not start.",
        derived=Derived("number, bytes and hash of the files of the stream", _shards, (".stream",)),
    )
    weight: float = key(1.0, "Share of this source in the blend, before normalisation.", gt=0)
    name: Derivable[str] = key(
        None, "Name in reports.", derived=Derived("the last part of stream or path", _source_name, (".path", ".stream"))
    )
    loss: bool = key(True, "Whether tokens of this source count in the loss.")
    loss_weight: float = key(1.0, "Weight of this source's labels in the training loss, a weighted mean.", ge=0)
    document_weights: str | None = key(
        None,
        "A .npy file with one number for each document of the file, by which the weights of its labels are multiplied "
        "in training.",
    )
    labels: str | None = key(None, "Prefix of a parallel token file: -100 where a token is no target, else the token.")


class Phase(Section):
    start: int = key(..., "First step of the phase.", unit="steps", ge=0)
    sources: list[SourceSection] = key(..., "The blend from that step on.", min_length=1)


class FillInTheMiddle(Section):
    rate: float = key(0.0, "Share of documents that become prefix, suffix, middle (Bavarian et al., 2022).", ge=0, le=1)
    suffix_first_rate: float = key(0.5, "Share of those whose suffix comes first (SPM).", ge=0, le=1)
    prefix: str = key("<|fim_prefix|>", "Token before the prefix.")
    middle: str = key("<|fim_middle|>", "Token before the middle.")
    suffix: str = key("<|fim_suffix|>", "Token before the suffix.")


class SpanCorruptionSection(Section):
    rate: float = key(0.0, "Share of documents from which spans are taken (Raffel et al., 2020).", ge=0, le=1)
    noise_density: float = key(0.15, "Share of the tokens of such a document that are taken.", gt=0, lt=1)
    mean_span_length: float = key(3.0, "Tokens of a span, on average.", unit="tokens", ge=1)
    sentinel: str = key("<extra_id_{}>", "Token of the tokenizer for a span. {} is the number of the span, from 0.")
    sentinels: int = key(100, "Number of such tokens, and largest number of spans of a document.", gt=0, le=10**5)
    loss: Literal["targets", "all"] = key(
        "targets", "Labels of such a document that count: the spans behind it (with its end-of-document token), or all."
    )


class StreamingSection(Section):
    text: str = key("text", "Key of the text in JSON objects, and its column in tables.")
    workers: int | None = key(None, "Processes that tokenise a stream on one host. Default: half its processors.", gt=0)
    patience: float = key(600.0, "Time without new tokens after which a waiting rank ends.", unit="seconds", gt=0)


class LeftOutSection(Section):
    step: int = key(..., "First step after the skipped batches.", unit="steps", ge=0)
    batches: int = key(..., "Number of batches that are skipped there.", unit="batches", gt=0)


class DataSection(Section):
    train: list[SourceSection] = key(list, "Training sources: a path, a list of paths, or a list of {path, weight}.")
    validation: dict[str, list[SourceSection]] = key(dict, "Named validation sets. A path or list is `validation`.")
    test: dict[str, list[SourceSection]] = key(dict, "Named test sets.")
    split: list[float] | None = key(
        None, "Cut one file's documents into training, validation and test by these shares (GPT-NeoX data_path)."
    )
    order: Literal["pythia", "stream", "sequential", "window"] = key(
        "pythia",
        "Sample order. pythia: GPT-NeoX's shuffle. stream: a keyed permutation without index files. sequential: "
        "the order of the file (pre-shuffled files). window: a keyed permutation of windows of the file, which data "
        "from a stream must have.",
    )
    window: int = key(65536, "window order: samples that are shuffled together in the first epoch.", gt=0, le=2**40)
    streaming: StreamingSection = key(StreamingSection, "Sources that have `stream`.")
    seed: Derivable[int] = key(None, "Seed of the order.", derived=same_as("training.seed"), ge=0)
    margin: float = key(1.005, "pythia: each blended source is asked for this many times its share of samples.", ge=1)
    weighting: Literal["given", "documents", "tokens", "neox-documents"] = key(
        "given",
        "Shares of a blend. given: the weights. documents, tokens: weight * (documents or tokens of the source) "
        "** data.alpha. neox-documents: GPT-NeoX's weight_by_num_documents, p ** data.alpha * (1 - p) of the "
        "share p of documents, which ignores the weights.",
    )
    alpha: float = key(1.0, "Exponent of data.weighting. Below 1 small sources count for more.", ge=0)
    packing: Literal["continuous", "best_fit", "until_overflow", "unpacked"] = key(
        "continuous",
        "continuous: documents back to back, and cut. best_fit: whole documents, with the least room left in "
        "samples. until_overflow: GPT-NeoX's pack_until_overflow, whole documents in shuffled order until the "
        "next one does not fit. It fills the rest with id 0, which counts in the loss. unpacked: one document, and a "
        "filler that does not count.",
    )
    drop_long: bool = key(False, "until_overflow, unpacked: skip documents longer than a sample, not cut them.")
    epoch_parts: int = key(
        1,
        "training.epochs: an epoch ends with the last whole batch, or with the last whole part of one if batches have "
        "several (GPT-NeoX: gradient_accumulation_steps).",
        gt=0,
    )
    phases: list[Phase] = key(list, "Blends that replace data.train from given steps on.")
    left_out: list[LeftOutSection] = key(list, "Skipped batches, in the order of the skips (docs/reliability.md).")
    reset_attention_at_eod: bool = key(False, "Packed documents do not attend to each other, and restart positions.")
    mask_loss_at_eod: bool = key(False, "The end-of-document token is not a target.")
    fim: FillInTheMiddle = key(FillInTheMiddle, "Fill-in-the-middle: reordered documents teach the model to infill.")
    span_corruption: SpanCorruptionSection = key(
        SpanCorruptionSection, "Span corruption: the model writes spans that were taken from a document behind it."
    )
    cache: Derivable[str] = key(
        None,
        "Folder of sample order caches.",
        derived=Derived("<run.dir>/cache", lambda own, at: f"{at['run.dir']}/cache", ("run.dir",)),
    )
    workers: int = key(1, "Background threads that prepare batches.", ge=0)
    prefetch: int = key(2, "Steps prepared ahead.", unit="steps", ge=0)
    synthetic: str = key(
        "none", "Samples without files: `copy` is a learnable random task for tests.", role=SOURCE, words=("none",)
    )
    options: dict[str, Any] = key(dict, "Options of data.synthetic, for a source from a package of yours.")


class TokenizerSection(Section):
    type: Literal["huggingface", "sentencepiece", "tiktoken", "gpt2", "bytes", "characters", "none"] = key(
        "huggingface", "Kind of tokenizer."
    )
    path: str | None = key(None, "tokenizer.json, a model file, or a name on the hub.")
    merges: str | None = key(None, "gpt2: the merges file of the vocabulary.")
    eod_token: str | None = key(None, "Text of the end-of-document token.", derived="the tokenizer's own end token")
    eod_id: int | None = key(None, "Id of the end-of-document token.", derived="from the tokenizer", ge=0)

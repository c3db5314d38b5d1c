"""A score of a text by a classifier: of transformers, of fastText, or of words, made of two sets of texts."""

import math
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from megatron.config.file_access import parse_json, unreadable
from megatron.config.problems import ABSENT, Problem
from megatron.config.section import Section, key

from ..signals import normalised
from .contract import Removed, StageKind, Work
from .language import FASTTEXT, fasttext_model, fasttext_problems

SHOWN = 8  # labels in a message
BUCKETS = 1 << 18  # of hashed words and pairs of words
Score = Callable[[str], list[float]]  # of each window of a text


class ClassifierSection(Section):
    name: str = key("classifier", "Name of the score in reasons and in the metadata of documents.")
    model: str | None = key(
        None,
        "A folder with a sequence classifier of transformers, or a fastText model. Without one, a classifier of words "
        "is made of `like` and `unlike`.",
    )
    like: list[str] = key(list, "Files of texts that get a score near 1, without a model. Paragraphs are texts.")
    unlike: list[str] = key(list, "Files of texts that get a score near 0.")
    label: str | None = key(
        None,
        "Label whose probability is the score. Default: the model's last, and of fastText's the last of the alphabet.",
    )
    least: float = key(0.0, "A document with a smaller score is removed.", ge=0, le=1)
    most: float = key(1.0, "A document with a larger score is removed.", ge=0, le=1)
    of: Literal["max", "mean", "min"] = key("max", "Score of a text that has several windows.")
    window: int = key(512, "Length of a window: tokens of the model, or words.", ge=8)


def _grams(words: list[str]) -> np.ndarray:
    """Hashed words and pairs of neighbours, int64."""
    grams = [*words, *map(" ".join, zip(words, words[1:]))]
    return np.array([xxhash.xxh3_64_intdigest(each.encode("utf-8")) % BUCKETS for each in grams], np.int64)


def _of_words(options: ClassifierSection) -> Score:
    """The logistic function of the mean log-ratio of the hashed n-grams that one of the sets has, in both sets.

    A ratio is of relative frequencies, with half a count added to each. This is naive Bayes, divided by the number of
    n-grams so that long texts are not all 0 or 1. 0.5 for a text that shares none with them."""
    counts = [np.zeros(BUCKETS), np.zeros(BUCKETS)]
    for files, count in zip((options.like, options.unlike), counts):
        for file in files:
            for text in Path(file).read_text(encoding="utf-8").split("\n\n"):
                np.add.at(count, _grams(normalised(text).split()), 1)
    like, unlike = counts
    ratio = np.log((like + 0.5) / (like.sum() + 1)) - np.log((unlike + 0.5) / (unlike.sum() + 1))
    known = like + unlike > 0

    def score(text: str) -> list[float]:
        words, found = normalised(text).split(), []
        for first in range(0, max(len(words), 1), options.window):
            grams = _grams(words[first : first + options.window])
            grams = grams[known[grams]]
            found.append(1 / (1 + math.exp(-ratio[grams].mean())) if len(grams) else 0.5)
        return found

    return score


def _of_transformers(options: ClassifierSection) -> Score:
    """Windows one by one on one thread: a document's score does not depend on its neighbours."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert options.model is not None
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False, local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model, trust_remote_code=False, local_files_only=True, use_safetensors=True, dtype=torch.float32
    ).eval()
    labels = {str(name): int(number) for number, name in model.config.id2label.items()}
    place = labels[options.label] if options.label is not None else max(labels.values())
    own = max(options.window - tokenizer.num_special_tokens_to_add(), 1)

    def score(text: str) -> list[float]:
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        found = []
        for first in range(0, max(len(ids), 1), own):
            window = tokenizer.decode(ids[first : first + own])
            given = tokenizer(window, truncation=True, max_length=options.window, return_tensors="pt")
            with torch.inference_mode():
                found.append(float(model(**given).logits[0].double().softmax(-1)[place]))
        return found

    return score


def _of_fasttext(options: ClassifierSection) -> Score:
    assert options.model is not None
    probabilities = fasttext_model(options.model)

    def score(text: str) -> list[float]:
        found = probabilities(text)
        label = options.label if options.label is not None else max(found)
        if label not in found:
            raise ValueError(f"the model has no label {label!r}, but {', '.join(sorted(found)[:SHOWN])}")
        return [found[label]]

    return score


def _classifier(options: ClassifierSection) -> Work:
    if options.model is None:
        score = _of_words(options)
    else:
        score = (_of_fasttext if options.model.endswith(FASTTEXT) else _of_transformers)(options)

    def work(document: Any) -> Removed | None:
        windows = score(document.text)
        if not all(map(math.isfinite, windows)):
            raise ValueError("the model gives no number")  # and no comparison with it would remove the document
        found = {"max": max(windows), "mean": sum(windows) / len(windows), "min": min(windows)}
        document.metadata.setdefault("scores", {})[options.name] = found
        value = found[options.of]
        if value < options.least:
            return Removed(f"{options.name} below {options.least:g}", f"{value:.4f}")
        return Removed(f"{options.name} above {options.most:g}", f"{value:.4f}") if value > options.most else None

    return work


def _rules(options: ClassifierSection, path: str, where: str) -> Iterable[Problem]:
    if options.model is None:
        for name, files in (("like", options.like), ("unlike", options.unlike)):
            if not files:
                rule = f"{path}.{name} must name files of texts, unless there is a model"
                yield Problem(f"{path}.{name}", rule, "give both, or model: FOLDER", ABSENT, where)
            for each in files:
                if why := unreadable(each):
                    rule = f"{path}.{name} must be readable files: {why}"
                    yield Problem(f"{path}.{name}", rule, "check the path", each, where)
    elif options.like or options.unlike:
        rule = f"{path} must have a model or texts (like, unlike), and has both"
        yield Problem(f"{path}.model", rule, "remove one of them", options.model, where)
    elif options.model.endswith(FASTTEXT):
        yield from fasttext_problems(options.model, f"{path}.model", where)
    else:
        yield from _folder_problems(options, f"{path}.model", where)


def _folder_problems(options: ClassifierSection, path: str, where: str) -> Iterable[Problem]:
    assert options.model is not None
    file = Path(options.model) / "config.json"
    if why := unreadable(file):
        rule = f"{path} must be a folder of transformers, or a .bin or .ftz of fastText: {why}"
        yield Problem(path, rule, "give the folder of the saved model", options.model, where)
        return
    if find_spec("transformers") is None:
        rule = f"{path} must be read with the package transformers, which is not installed"
        yield Problem(path, rule, 'pip install "deepy[hf]"', options.model, where)
    try:
        labels = parse_json(file.read_text(encoding="utf-8")).get("id2label", {"0": "LABEL_0", "1": "LABEL_1"}).values()
    except (ValueError, AttributeError) as error:
        yield Problem(path, f"{path} must have a readable config.json: {error}", "save it again", options.model, where)
        return
    if len(labels) < 2:
        rule = f"{path} must have at least two labels: the probability of its only output is always 1"
        yield Problem(
            path,
            rule,
            "give a classifier, or keep by stored scores: keep: {signals: {record.KEY: [3, 5]}}",
            options.model,
            where,
        )
    if options.label is not None and options.label not in labels:
        rule = f"the label must be one of {', '.join(map(str, labels))}"
        yield Problem(path.replace(".model", ".label"), rule, "name one of them", options.label, where)


def _files(options: ClassifierSection) -> list[str]:
    return [options.model] if options.model else [*options.like, *options.unlike]


CLASSIFIER = StageKind(ClassifierSection, work=_classifier, rules=_rules, files=_files)

"""Stages that score a text by a model: languages, classifiers, and the escalation from one stage to the next."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from datatrove.data import Document  # noqa: E402

from megatron.curation.signals import normalised  # noqa: E402
from megatron.curation.stages import STAGES  # noqa: E402
from megatron.curation.stages.language import by_words  # noqa: E402
from tests.curation.recipes import curate, lines, written  # noqa: E402

TEXTS = {
    "en": "The cat sat on the mat, and it was not happy with the way that it had been moved from its chair.",
    "de": "Die Katze saß auf der Matte und war nicht froh, dass sie von ihrem Stuhl vertrieben worden ist.",
    "fr": "Le chat était assis sur le tapis, et il ne voulait pas que les enfants jouent avec lui dans la maison.",
    "es": "El gato se sentó en la alfombra y no quería que los niños jugaran con él por la tarde en la casa.",
    "it": "Il gatto era seduto sul tappeto e non voleva che i bambini della casa giocassero con lui nella sera.",
    "nl": "De kat zat op de mat en was niet blij dat zij van haar stoel was verdreven door een van de kinderen.",
    "pl": "Kot siedział na macie i nie był zadowolony, że został przeniesiony z krzesła przez jedno z dzieci.",
    "ru": "Кошка сидела на коврике и была недовольна.",
    "ja": "猫はマットの上に座っていました。",
    "zh": "猫坐在垫子上，很不高兴。",
    "ko": "고양이가 매트 위에 앉아 있었다.",
    "el": "Η γάτα κάθισε στο χαλί.",
}


def test_languages_of_sentences() -> None:
    found = {name: by_words(text) for name, text in TEXTS.items()}
    assert {name: each for name, (each, _) in found.items()} == {name: name for name in TEXTS}
    assert all(0.5 < score <= 1 for _, score in found.values())
    assert by_words("1234 !?") == ("und", 0.0) and by_words("xyzzy plugh") == ("und", 0.0)
    counts = {"en": 2, "de": 1}
    assert by_words("the of der Qx") == ("en", counts["en"] / sum(counts.values()))


def test_languages_that_are_kept(tmp_path: Path) -> None:
    written(tmp_path, "in", [*TEXTS.values(), "xyzzy"])
    report = curate(tmp_path, [{"language": {"keep": ["en", "de"]}}], [{"name": "s", "path": str(tmp_path / "in")}])
    assert [each["metadata"]["language"] for each in lines(tmp_path / "out/documents")] == ["en", "de"]
    assert report["removed"] == {"01_language": {"its language is not kept": {"s": len(TEXTS) - 1}}}


def stage(name: str, **options):
    kind = STAGES[name]
    return kind.work(kind.options(**options))


def test_the_classifier_of_words_against_its_formula(tmp_path: Path) -> None:
    like, unlike = ["red green blue", "red red"], ["grey black grey"]
    (tmp_path / "like.txt").write_text("\n\n".join(like))
    (tmp_path / "unlike.txt").write_text("\n\n".join(unlike))
    given = {"like": [str(tmp_path / "like.txt")], "unlike": [str(tmp_path / "unlike.txt")]}

    def grams(text: str) -> Counter:
        words = normalised(text).split()
        return Counter([*words, *zip(words, words[1:])])

    first, second = (sum(map(grams, each), Counter()) for each in (like, unlike))

    def expected(text: str) -> float:
        ratios = [
            math.log((first[each] + 0.5) / (first.total() + 1)) - math.log((second[each] + 0.5) / (second.total() + 1))
            for each in grams(text).elements()
            if first[each] + second[each]
        ]
        return 1 / (1 + math.exp(-sum(ratios) / len(ratios))) if ratios else 0.5

    work = stage("classifier", **given, least=0.5)
    for text in ("Red, green blue!", "grey black", "red black unknown", "unknown", "red green grey grey"):
        document = Document(text, "a")
        gone = work(document)
        score = document.metadata["scores"]["classifier"]["max"]
        assert score == pytest.approx(expected(text), rel=1e-12) and (gone is None) == (score >= 0.5)
    parts = Document(" ".join(["red"] * 8 + ["grey"] * 8), "a")
    stage("classifier", **given, window=8)(parts)
    found = parts.metadata["scores"]["classifier"]
    assert found["max"] == pytest.approx(expected("red " * 8)) and found["min"] == pytest.approx(expected("grey " * 8))


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A tiny sequence classifier with random weights, as transformers saves it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{each}" for each in "abcdefghij")]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(
        vocab_file=str(folder / "vocab.txt"), vocab={each: n for n, each in enumerate(words)}
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        id2label={0: "clean", 1: "other"},
        label2id={"clean": 0, "other": 1},
        initializer_range=1.0,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_classifier_of_transformers_and_a_sweep_of_thresholds(bert: Path) -> None:
    """Scores are transformers' own, window by window. Every threshold decides as the stored scores say."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModelForSequenceClassification.from_pretrained(bert)
    draw, scores = random.Random(4), {}
    texts = [" ".join(draw.choice("abcdefghij") for _ in range(draw.randrange(1, 40))) for _ in range(12)]
    work = stage("classifier", model=str(bert), window=16)
    for text in texts:
        document = Document(text, "a")
        assert work(document) is None
        words, found = text.split(), []
        for first in range(0, len(words), 14):  # and two special tokens
            given = tokenizer(" ".join(words[first : first + 14]), return_tensors="pt")
            with torch.no_grad():
                found.append(float(model.double()(**given).logits[0].softmax(-1)[1]))
        scores[text] = document.metadata["scores"]["classifier"]
        assert scores[text]["max"] == pytest.approx(max(found), abs=1e-5)  # float32 against float64
        assert scores[text]["mean"] == pytest.approx(sum(found) / len(found), abs=1e-5)
    for threshold in (0.0, 0.3, 0.5, 0.7, 1.0):
        for of in ("max", "min"):
            work = stage("classifier", model=str(bert), window=16, most=threshold, of=of)
            kept = [work(Document(text, "a")) is None for text in texts]
            assert kept == [scores[text][of] <= threshold for text in texts]
    document = Document(texts[0], "a")
    stage("classifier", model=str(bert), window=16, label="clean")(document)
    assert document.metadata["scores"]["classifier"]["min"] == pytest.approx(1 - scores[texts[0]]["max"], abs=1e-6)


def test_a_score_that_is_no_number_keeps_no_document(bert: Path, tmp_path: Path, monkeypatch) -> None:
    from megatron.curation.stages import classifier

    monkeypatch.setattr(classifier, "_of_transformers", lambda options: lambda text: [0.1, math.nan])
    for limits in ({"most": 0.5}, {"least": 0.5}):
        with pytest.raises(ValueError, match="no number"):  # which puts it into quarantine
            stage("classifier", model=str(bert), **limits)(Document("a b", "a"))


def test_mistakes_about_models(bert: Path, tmp_path: Path) -> None:
    def found(name: str, **options) -> list[str]:
        kind = STAGES[name]
        return [each.key for each in kind.rules(kind.options(**options), name, "")]

    assert found("classifier") == ["classifier.like", "classifier.unlike"]
    assert found("classifier", model=str(tmp_path)) == ["classifier.model"]
    assert found("classifier", model=str(bert), label="bad") == ["classifier.label"]
    assert found("classifier", model=str(bert), label="clean") == []
    assert found("classifier", model=str(bert), like=["a"]) == ["classifier.model"]
    (tmp_path / "config.json").write_text('{"id2label": {"0": "score"}}')
    assert found("classifier", model=str(tmp_path)) == ["classifier.model"]  # a regression: softmax gives 1
    assert found("classifier", model="absent.bin") == ["classifier.model"]
    assert found("language", keep=["en", "xx"]) == ["language.keep"]
    assert found("language", model="lid.txt") == ["language.model"]


def test_escalation_is_the_conjunction_of_its_levels(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "terms.txt").write_text("a b\nc d\n")
    draw = random.Random(6)
    texts = [" ".join(draw.choice("abcd") for _ in range(draw.randrange(2, 30))) for _ in range(60)]
    texts = list(dict.fromkeys(texts))
    written(tmp_path, "in", texts)
    blocklist = {"blocklist": {"file": str(tmp_path / "terms.txt"), "least": 2}}
    classifier = {"classifier": {"model": str(bert), "window": 16, "most": 0.5}}
    report = curate(tmp_path, [{"escalate": [blocklist, classifier]}], [{"name": "s", "path": str(tmp_path / "in")}])
    listed = [("a b" in text and "c d" in text) for text in texts]
    work = stage("classifier", **classifier["classifier"])
    both = [each and work(Document(text, "a")) is not None for each, text in zip(listed, texts)]
    assert 0 < sum(both) < sum(listed) < len(texts)
    assert [each["text"] for each in lines(tmp_path / "out/documents")] == [
        t for t, gone in zip(texts, both) if not gone
    ]
    assert report["noted"]["01_escalate"] == {"escalated, and kept by 02_classifier": {"s": sum(listed) - sum(both)}}
    assert report["removed"]["01_escalate"] == {"classifier above 0.5": {"s": sum(both)}}


def test_a_fasttext_model_of_both_stages(tmp_path: Path) -> None:
    """Where fastText is installed: labels and probabilities of its own bound function, line ends being spaces."""
    fasttext = pytest.importorskip("fasttext")
    lines_ = [f"__label__{name} {text}\n" for name, text in TEXTS.items()]
    (tmp_path / "train.txt").write_text("".join(lines_ * 30))
    model = fasttext.train_supervised(
        str(tmp_path / "train.txt"), dim=8, epoch=60, lr=1.0, minn=1, maxn=3, bucket=2000, verbose=0, thread=1
    )
    model.save_model(str(tmp_path / "model.bin"))
    with pytest.raises(ValueError, match="no label 'De'"):
        stage("classifier", model=str(tmp_path / "model.bin"), label="De")(Document("a b", "a"))
    language = stage("language", model=str(tmp_path / "model.bin"), keep=["en"])
    german = stage("classifier", model=str(tmp_path / "model.bin"), label="de", most=0.5)
    for name, text in TEXTS.items():
        document = Document(text.replace(" ", "\n", 1), "a")
        assert (language(document) is None) == (name == "en") and document.metadata["language"] == name
        assert (german(document) is None) == (name != "de")
        expected = {label: value for value, label in model.f.predict(text + "\n", -1, 0.0, "strict")}
        assert document.metadata["scores"]["classifier"]["max"] == pytest.approx(
            min(expected["__label__de"], 1), abs=1e-6
        )

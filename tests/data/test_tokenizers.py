"""Tokenizers against their own libraries, their hashes, training, and agreement in a blend."""

from __future__ import annotations

import json

import pytest

from megatron.config.arithmetic.tokenizer_size import tokenizer_size
from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.inputs import find_inputs
from megatron.data.corpus.job import TokenizeJob, run
from megatron.data.corpus.vocabulary import texts, train
from megatron.data.errors import DataError
from megatron.data.plan_builder import build_plan
from megatron.data.tokenizer import HuggingFaceTokenizer, TiktokenTokenizer, build_tokenizer
from tests.data.make import configuration
from tests.paths import shared

GOLDEN = shared("data/20B_tokenizer.json")
SAMPLES = [
    "Hello world",
    "",
    " \n\n  x",
    "naïve 漢字 🙂 <|endoftext|> end",
    "def f(x):\n\treturn x**2",
    "0123456789 " * 9,
]
CORPUS = [
    f"The {number} quick brown foxes jump over {number * 7} lazy dogs.\n\tÄpfel und {chr(0x4E00 + number)} Birnen"
    for number in range(300)
]


def section(**values) -> TokenizerSection:
    return TokenizerSection(**values)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS))
    return path


def trained(corpus, kind, size, output, special=()):
    made = train(kind, texts(find_inputs([str(corpus)]), Treatment()), size, output, special)
    return made


@pytest.mark.skipif(GOLDEN is None, reason="the GPT-NeoX tokenizer is not here")
def test_the_gpt_neox_tokenizer():
    from tokenizers import Tokenizer

    tokenizer, library = build_tokenizer(section(path=str(GOLDEN))), Tokenizer.from_file(str(GOLDEN))
    assert (tokenizer.size, tokenizer.eod_id) == (50277, 0)
    assert tokenizer.size == tokenizer_size(section(path=str(GOLDEN)).model_dump())
    for text in SAMPLES:
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(SAMPLES) == [tokenizer.encode(text) for text in SAMPLES]


@pytest.mark.parametrize("normaliser", ["NFC", "NFKC", "Lowercase", "Strip", "BertNormalizer"])
@pytest.mark.parametrize("words", ["ByteLevel", "Metaspace", "BertPreTokenizer", "Whitespace"])
def test_texts_of_a_batch_have_the_ids_of_single_texts(words, normaliser):
    """With added tokens, and truncation, padding and a template in the file, which do not apply."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = getattr(normalizers, normaliser)(), getattr(pre_tokenizers, words)()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"], show_progress=False)
    backend.train_from_iterator(CORPUS[:100] + SAMPLES, trainer)
    backend.add_tokens([AddedToken("fox", single_word=True), AddedToken("Über", normalized=True, lstrip=True)])
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = HuggingFaceTokenizer(backend, "", "made", "<unk>")
    odd = ["fox foxes  Über über", "a <mask> b<mask>", "<s>e\u0301 \ufb01 \u0130 \0", "\u0301", "👩🏽\u200d🚀"]
    batch = tokenizer.encode_batch(SAMPLES + odd + CORPUS[-3:])
    assert batch == [tokenizer.encode(text) for text in SAMPLES + odd + CORPUS[-3:]] and max(map(len, batch)) > 9


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_byte_level(tmp_path, corpus, kind):
    made = trained(corpus, kind, 400, tmp_path / "t.json", ("<|fim_prefix|>",))
    tokenizer = build_tokenizer(section(path=made["path"]))
    assert tokenizer.size == made["size"] <= 400 and tokenizer.eod_id == 0 and tokenizer.encode("<|fim_prefix|>") == [1]
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(CORPUS[5])) < len(CORPUS[5].encode()) / (
        2 if kind == "bpe" else 1
    )  # little text to learn from
    again = trained(corpus, kind, 400, tmp_path / "u.json", ("<|fim_prefix|>",))
    assert kind == "unigram" or build_tokenizer(section(path=again["path"])).hash == tokenizer.hash
    with pytest.raises(DataError, match="at least 257"):
        trained(corpus, kind, 100, tmp_path / "small.json")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_sentencepiece(tmp_path, corpus, kind):
    import sentencepiece

    made = trained(corpus, f"sentencepiece-{kind}", 700, tmp_path / "t.model")
    tokenizer = build_tokenizer(section(type="sentencepiece", path=made["path"]))
    library = sentencepiece.SentencePieceProcessor(model_file=made["path"])
    assert tokenizer.size == library.vocab_size() and tokenizer.eod_id == 0
    for text in SAMPLES[:3] + SAMPLES[4:]:
        assert tokenizer.encode(text) == library.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode("ab"), 0, *tokenizer.encode("c")]) == "ab<|endoftext|>c"


def test_gpt2_files(tmp_path, corpus):
    """Vocabulary and merges written by transformers' own writer give what transformers' GPT-2 tokenizer gives."""
    import transformers

    trained(corpus, "bpe", 350, tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = build_tokenizer(section(type="gpt2", path=str(tmp_path / "vocab.json")))
    other = transformers.GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in (*CORPUS[:5], "x  y\n\nz it's"):
        assert tokenizer.encode(text) == other.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod_id == content["vocab"]["<|endoftext|>"]


def test_bytes_and_characters(tmp_path, corpus):
    tokenizer = build_tokenizer(section(type="bytes"))
    assert (tokenizer.size, tokenizer.eod_id, tokenizer.encode("é")) == (257, 256, [0xC3, 0xA9])
    assert tokenizer.decode([104, 105, 256, 0xC3]) == "hi<|endoftext|>\ufffd"
    neox = build_tokenizer(section(type="characters"))
    assert (neox.size, neox.eod_id, neox.encode("hé")) == (512, 0, [104, 0xC3, 0xA9])
    made = trained(corpus, "characters", 0, tmp_path / "c.json")
    characters = build_tokenizer(section(type="characters", path=made["path"]))
    assert characters.size == made["size"] == len(set("".join(CORPUS))) + 2
    assert characters.decode(characters.encode(CORPUS[3])) == CORPUS[3]
    assert characters.encode("\u1234") == [characters.unknown_id]


def test_hashes_tell_tokenizers_apart(tmp_path, corpus):
    trained(corpus, "bpe", 300, tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "same.json").write_text(
        json.dumps({
            **content,
            "truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        })
    )
    trained(corpus, "bpe", 301, tmp_path / "b.json")
    first, same, other = (build_tokenizer(section(path=str(tmp_path / f"{name}.json"))) for name in ("a", "same", "b"))
    assert first.hash == same.hash != other.hash
    assert same.encode(CORPUS[0]) == first.encode(CORPUS[0])


@pytest.mark.parametrize(
    "values, match",
    [
        ({"type": "none"}, "there is no tokenizer"),
        ({"path": None}, "needs a tokenizer.json"),
        ({"path": "/no/such/t.json"}, "does not exist"),
        ({"type": "sentencepiece", "path": "/no/such"}, "does not exist"),
        ({"type": "tiktoken", "path": "nope"}, "no encoding"),
        ({"type": "gpt2", "path": "/no/such"}, "is missing"),
        ({"type": "bytes", "eod_id": 900}, "is no id"),
    ],
)
def test_refusals(values, match):
    with pytest.raises(DataError, match=match):
        build_tokenizer(section(**values))


def test_damaged_files(tmp_path):
    for name, kind in (("t.json", "huggingface"), ("t.model", "sentencepiece"), ("c.json", "characters")):
        (tmp_path / name).write_text("{nonsense")
        with pytest.raises(DataError, match="t.json|t.model|c.json"):
            build_tokenizer(section(type=kind, path=str(tmp_path / name)))


def test_a_blend_of_two_tokenizers_is_refused(tmp_path, corpus):
    for name, kind in (("a", "bytes"), ("b", "characters")):
        run(TokenizeJob(find_inputs([str(corpus)]), tmp_path / name, section(type=kind), Treatment()))
    paths = [str(tmp_path / name) for name in "ab"]
    for train_data, kind, match in (
        (paths, "none", "their ids mean different texts"),
        (paths[:1], "characters", "not the run's"),
    ):
        config = configuration({"train": train_data}, tokenizer={"type": kind}, run={"dir": str(tmp_path)})
        with pytest.raises(DataError, match=match):
            build_plan(config)
    build_plan(configuration({"train": paths[:1]}, tokenizer={"type": "bytes"}, run={"dir": str(tmp_path)}))


def test_tiktoken_ids_without_a_text(monkeypatch):
    """cl100k_base has some, which a model may draw."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([each]): each for each in range(256)}
    own = tiktoken.Encoding("holes", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["holes"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: own)
    tokenizer = TiktokenTokenizer("holes")
    assert tokenizer.size == 259 and tokenizer.eod_id == 258
    text = "aé漢"
    assert tokenizer.decode(tokenizer.encode(text)) == own.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([97, 256, 257, 98, 258]) == "ab<|endoftext|>"
    assert tokenizer.decode([0xE6, 98]) == own.decode([0xE6, 98])

"""Conversations to ids and labels, next to transformers' own rendering and masks."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron.config.sections.data import TokenizerSection
from megatron.data.chat.encode import (
    TAGS,
    TEMPLATES,
    BadConversation,
    ChatEncoder,
    ChatTemplate,
    ChatTreatment,
    conversation_of,
    find_template,
)
from megatron.data.chat.job import ChatJob, run
from megatron.data.corpus.inputs import find_inputs
from megatron.data.errors import DataError
from megatron.data.manifest import read_manifest
from megatron.data.sample import IGNORED
from megatron.data.token_file import TokenFile

BOS, EOS = "<s>", "</s>"
SPECIAL = [BOS, EOS, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]"]
WORDS = "the cat sat, on a mat?  12 naïve 猫 \n\n def f(x): return x*2 🙂 don't Yes. {{ no }} {% x %} <b>".split(" ")


def tagged(turn: str, others: str, begin: str, start: str = "") -> str:
    """A template: `turn` of the assistant after `begin`, `others` of everybody else."""
    answer = "{% generation %}{{ " + turn + " }}{% endgeneration %}"
    return (
        start
        + "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        + "{{ '"
        + begin
        + "' }}"
        + answer
        + "{% else %}{{ "
        + others
        + " }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '"
        + begin
        + "' }}{% endif %}"
    )


CONTENT, ROLE = "message['content']", "message['role']"
FORMS = TEMPLATES | {
    "gemma": tagged(
        f"{CONTENT} + '<end_of_turn>\\n'",
        f"'<start_of_turn>user\\n' + {CONTENT} + '<end_of_turn>\\n'",
        "<start_of_turn>model\\n",
        "{{ bos_token }}",
    ),
    "llama 2": tagged(f"{CONTENT} + ' </s>'", f"'<s>[INST] ' + {CONTENT} + ' [/INST]'", " "),
    "zephyr": tagged(f"{CONTENT} + eos_token", f"'<|user|>\\n' + {CONTENT} + eos_token + '\\n'", "<|assistant|>\\n"),
    "phi 3": tagged(f"{CONTENT} + '<|end|>'", f"'<|user|>\\n' + {CONTENT} + '<|end|>\\n'", "<|assistant|>\\n"),
    "vicuna": tagged(f"{CONTENT} + '</s>'", f"'USER: ' + {CONTENT} + ' '", "ASSISTANT:"),
    "alpaca": tagged(
        f"{CONTENT} + eos_token", f"'### {{}}:\\n'.format({ROLE}) + {CONTENT} + '\\n\\n'", "### Response:\\n"
    ),
    "trimmed": tagged(f"{CONTENT} | trim + '<|im_end|>'", f"{ROLE} + ': ' + {CONTENT} | trim + '\\n'", "bot: "),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(
        [" ".join(WORDS) * 3, "user assistant system USER ASSISTANT model ### Response"], trainer
    )
    place = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(place / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATES["chatml"]}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


def section(folder: Path) -> TokenizerSection:
    return TokenizerSection(type="huggingface", path=str(folder), eod_token=EOS)


def conversations(count: int, seed: int) -> list[list[dict[str, str]]]:
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randrange(1, 12)))

    found = []
    for _ in range(count):
        start = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
        turns = [
            {"role": role, "content": text()} for _ in range(draw.randrange(1, 4)) for role in ("user", "assistant")
        ]
        found.append(start + turns)
    return found


def encoder(folder: Path, template: str, **treatment) -> ChatEncoder:
    values = {"bos_token": BOS, "eos_token": EOS}
    return ChatEncoder(section(folder), ChatTemplate("test", template, values), ChatTreatment(**treatment))


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_labels_are_those_of_transformers(form: str, folder: Path):
    """Ten templates with 100 conversations each. Without its tags a template gives the same, but for white space behind
    the end of a turn."""
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token=BOS, eos_token=EOS)
    ours = encoder(folder, FORMS[form], append_eod=False)
    bare = encoder(folder, re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", FORMS[form]), append_eod=False)
    assert ours.template.tagged and not bare.template.tagged
    for messages in conversations(100, 3):
        wanted = theirs.apply_chat_template(
            messages, chat_template=FORMS[form], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, labels = ours.encode(messages)
        assert ids == wanted["input_ids"]
        assert [label != IGNORED for label in labels] == [bool(each) for each in wanted["assistant_masks"]]
        again, parts = bare.encode(messages)
        assert again == ids
        for one, other, token in zip(parts, labels, ids):
            if one != other:
                assert one == IGNORED and not ours.tokenizer.decode([token]).strip()


def test_last_turn_and_all_tokens(folder: Path):
    messages = conversations(40, 5)[7]
    ids, every = encoder(folder, TEMPLATES["chatml"]).encode(messages)
    last = encoder(folder, TEMPLATES["chatml"], train="last").encode(messages)[1]
    whole = encoder(folder, TEMPLATES["chatml"], train="all").encode(messages)[1]
    turns = [each["content"] + "<|im_end|>" for each in messages if each["role"] == "assistant"]
    read = encoder(folder, TEMPLATES["chatml"]).tokenizer
    assert read.decode([label for label in every if label != IGNORED]) == "".join(turns)
    assert read.decode([label for label in last if label != IGNORED]) == turns[-1]
    assert whole[:-1] == ids[:-1] and ids[-1] == read.eod_id and whole[-1] == every[-1] == IGNORED


@pytest.mark.parametrize(
    "value, word",
    [
        ([], "list of messages"),
        ("text", "list of messages"),
        ([{"role": "user", "content": "a"}], "no message is the assistant's"),
        ([{"role": "robot", "content": "a"}], "'robot'"),
        ([{"role": "assistant", "content": 3}], "must have a text"),
        (["a"], "must be an object"),
        ([{"from": ["x"], "value": "a"}], "has the role"),
    ],
)
def test_what_is_no_conversation(value, word: str):
    with pytest.raises(BadConversation, match=re.escape(word)):
        conversation_of(value)


def test_names_of_sharegpt():
    found = conversation_of([{"from": "human", "value": "a", "content": None}, {"from": "gpt", "value": "b"}])
    assert found == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "template, answer, word",
    [
        ("chatml", "x<|im_end|>", "'<|im_end|>', which the template writes"),  # a message cannot end its own turn
        ("{{ raise_exception('no system') }}" + "{% generation %}{% endgeneration %}", "x", "no system"),
        ("{{ bos_token + bos_token }}" + TEMPLATES["plain"], "x", "two tokens that begin"),
        (
            "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}",
            "x",
            "no token of it",
        ),
        ("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "x", "when others follow"),
    ],
)
def test_conversations_that_a_template_cannot_have(template: str, answer: str, word: str, folder: Path):
    ours = encoder(folder, TEMPLATES.get(template, template), append_eod=False)
    messages = [USER, {"role": "assistant", "content": answer}, USER, {"role": "assistant", "content": "y"}]
    with pytest.raises(BadConversation, match=re.escape(word)):
        ours.encode(messages)


def test_a_token_across_the_border_is_refused(folder: Path):
    """`def` is one token. A template that glues text to an answer would train on half of it."""
    ours = encoder(
        folder, "{{ ' d' }}{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}", append_eod=False
    )
    assert len(ours.tokenizer.encode(" def")) == 1
    with pytest.raises(BadConversation, match="partly the assistant's"):
        ours.encode([USER, {"role": "assistant", "content": "ef"}])


def test_a_date_in_a_template_must_be_given(folder: Path):
    dated = "{% if date is defined %}{{ date }}{% else %}{{ strftime_now('%d %b') }}{% endif %}" + TEMPLATES["plain"]
    messages = [USER, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="must not depend on the day"):
        encoder(folder, dated).encode(messages)
    fixed = ChatEncoder(section(folder), ChatTemplate("t", dated, {"eos_token": EOS, "date": "1 Jan"}), ChatTreatment())
    assert fixed.tokenizer.decode(fixed.encode(messages)[0]).startswith("1 Jan")


def test_where_a_template_is_found(folder: Path, tmp_path: Path):
    own = find_template(str(folder / "tokenizer.json"), None, {})
    assert own.text == TEMPLATES["chatml"] and own.values == {"bos_token": BOS, "eos_token": EOS}
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="must have a chat template"):
        find_template(str(tmp_path), None, {})
    (tmp_path / "chat_template.jinja").write_text("own")
    assert find_template(str(tmp_path), None, {}).text == "own"
    assert find_template(str(tmp_path), "llama3", {}).text == TEMPLATES["llama3"]
    assert TAGS.search(TEMPLATES["plain"]) and own.hash != find_template(str(folder), "plain", {}).hash


def write(path: Path, chats: list) -> Path:
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    return path


def job(folder: Path, inputs: list[Path], output: Path, **more) -> ChatJob:
    template = ChatTemplate("chatml", TEMPLATES["chatml"], {"eos_token": EOS})
    treatment = ChatTreatment(**more.pop("treatment", {}))
    return ChatJob(find_inputs([str(each) for each in inputs]), output, section(folder), template, treatment, **more)


def test_files(folder: Path, tmp_path: Path):
    """Bad records are counted with their lines, and the output does not depend on the number of processes."""
    chats = conversations(60, 9)
    lines = write(tmp_path / "a.jsonl", [*chats[:40], [USER], "no"])
    with lines.open("a") as file:
        file.write("{broken\n\n[1]\n")
    (tmp_path / "b.json").write_text(json.dumps([{"messages": each} for each in chats[40:]]))
    done = run(job(folder, [lines, tmp_path / "b.json"], tmp_path / "one"))
    assert (done.conversations, done.bad) == (60, 4)
    assert [line for _, line, _ in done.examples] == [41, 42, 43, 45]
    run(job(folder, [lines, tmp_path / "b.json"], tmp_path / "two", workers=2))
    for ending in (".bin", ".idx", "_labels.bin", "_labels.idx"):
        assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"two{ending}").read_bytes()
    tokens, labels = TokenFile(tmp_path / "one"), TokenFile(tmp_path / "one_labels")
    ours = encoder(folder, TEMPLATES["chatml"])
    for number, messages in enumerate(chats):
        ids, marks = ours.encode(messages)
        assert tokens.read(number, 0, len(ids)).tolist() == ids and tokens.sizes[number] == len(ids)
        assert labels.read(number, 0, len(ids)).tolist() == marks
    manifest = read_manifest(tmp_path / "one")
    assert manifest is not None and manifest.options["template"] == "chatml" and manifest.options["bad"] == 4
    assert done.trained == int((np.fromfile(tmp_path / "one_labels.bin", "<i4") != IGNORED).sum())


def test_ratings_are_written_with_their_conversations(folder: Path, tmp_path: Path):
    """Of kept conversations only, in their order. Anything but a number, true or false makes a bad record."""
    given = [True, 2, None, -0.5, False, "1", float("nan"), 3]
    chats = conversations(len(given), 2)
    chats[-1] = [*chats[-1], {"role": "user", "content": "the " * 400}]
    lines = tmp_path / "rated.jsonl"
    lines.write_text("".join(json.dumps({"messages": c, "label": r}) + "\n" for c, r in zip(chats, given)))
    done = run(job(folder, [lines], tmp_path / "rated", treatment={"reward": "label", "longest": 300}))
    assert (done.conversations, done.bad, done.long) == (4, 3, 1)
    assert np.load(tmp_path / "rated_rewards.npy").tolist() == [1, 2, -0.5, -1]
    assert "key 'label'" in done.examples[0][2]


def test_what_a_job_refuses(folder: Path, tmp_path: Path):
    source = write(tmp_path / "a.jsonl", conversations(3, 1))
    run(job(folder, [source], tmp_path / "out"))
    with pytest.raises(DataError, match="must not exist yet"):
        run(job(folder, [source], tmp_path / "out"))
    run(job(folder, [source], tmp_path / "out", overwrite=True))
    with pytest.raises(DataError, match="no conversation was found.*3 too long"):
        run(job(folder, [source], tmp_path / "short", treatment={"longest": 2}))
    with pytest.raises(DataError, match="a.jsonl:1.*key 'text'"):
        run(job(folder, [source], tmp_path / "key", treatment={"key": "text"}, bad="fatal"))
    assert not list(tmp_path.glob("short*")) and not list(tmp_path.glob("key*"))

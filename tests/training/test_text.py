"""Text as it grows: nothing is shown that a stop string takes back, and no character before it is whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.data.tokenizer import BytesTokenizer
from megatron.training.text import main, pieces
from tests.decoding.test_growing_text import metaspace

BYTES = BytesTokenizer()


def cut(text: str, stops: list[str]) -> str:
    """Before the stop string that is complete first: where "a" ends a text, it is unknown whether "baa" would come."""
    for end in range(len(text) + 1):
        begins = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if begins:
            return text[: min(begins)]
    return text


@given(
    text=st.text(alphabet="abé→", max_size=30),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
@example(text="baa", stops=["a", "baa"])
def test_the_text_ends_before_the_first_stop_string(text, stops):
    found = list(pieces(BYTES.encode(text), BYTES, stops))
    assert "".join(found) == cut(text, stops)
    assert not any("\ufffd" in piece for piece in found)


def test_text_comes_as_soon_as_it_is_sure():
    read = []

    def tokens():
        for token in BYTES.encode("hé, stop it"):
            read.append(token)
            yield token

    growing = pieces(tokens(), BYTES, ["stool", "stop"])
    assert next(growing) == "h" and bytes(read) == b"h"
    assert next(growing) == "é" and bytes(read).decode() == "hé"
    assert "".join(growing) == ", " and bytes(read).decode() == "hé, stop", "nothing is read after the end"


def test_what_only_looked_like_a_stop_string_is_shown():
    assert "".join(pieces(BYTES.encode("sto, st"), BYTES, ["stop"])) == "sto, st"


def test_tokens_that_are_no_text_are_shown_at_the_end():
    assert "".join(pieces([104, 195], BYTES)) == "h\ufffd"


def test_an_empty_stop_string_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["nowhere", "--stop", ""])
    assert "--stop must be a text of at least one character" in capsys.readouterr().err


def test_several_ranks_cannot_be_asked(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["runs/mine"]) == 2
    assert "must have --prompt or --file" in capsys.readouterr().err


def test_a_word_after_a_prompt_has_its_space():
    tokenizer = metaspace()
    assert "".join(pieces([0, 2], tokenizer, after=[0])) == " ab"

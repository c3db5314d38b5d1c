"""JSON of others: one kind of error, whatever is in the file, and every reader takes it for damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config import file_access
from megatron.config.arithmetic.tokenizer_size import SizeUnknown, local_tokens, tokenizer_size
from megatron.config.file_access import parse_json, read_json
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.data.manifest import ENDING, read_manifest
from megatron.data.overlap.search import read_examples
from megatron.data.tokenizer import CharactersTokenizer, _end_of_folder

DEEP = 100_000 * "["


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "{", "", "9" * 5000])
def test_what_is_no_json_is_a_value_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    for read in (lambda: parse_json(text), lambda: parse_json(text.encode()), lambda: read_json(tmp_path / "a.json")):
        with pytest.raises(ValueError, match=r"."):
            read()


def test_what_python_reads_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"ä": [1, 2.5, null, "\\u00e9"]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"ä": [1, 2.5, None, "é"]}


def test_files_of_other_sizes_and_encodings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(UnicodeDecodeError):
        read_json(tmp_path / "a.json")
    monkeypatch.setattr(file_access, "LARGEST", 4)
    (tmp_path / "a.json").write_text("12345")
    with pytest.raises(ValueError, match="must have at most"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("1234")
    assert read_json(tmp_path / "a.json") == 1234


def size(kind: str) -> Callable[[Path], object]:
    return lambda path: tokenizer_size({"type": kind, "path": str(path)})


@pytest.mark.parametrize(
    "name, read, error",
    [
        ("tokenizer.json", size("huggingface"), SizeUnknown),
        ("vocab.json", size("gpt2"), SizeUnknown),
        ("characters.json", size("characters"), SizeUnknown),
        ("characters.json", CharactersTokenizer, DataError),
        ("tokenizer_config.json", lambda path: _end_of_folder(path.parent), DataError),
        (f"corpus{ENDING}", lambda path: read_manifest(path.parent / "corpus"), DataError),
        ("examples.jsonl", read_examples, DataError),
    ],
)
@pytest.mark.parametrize("text", [DEEP, "["])
def test_readers_take_it_for_damage(name: str, read: Callable, error: type[Exception], text: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    with pytest.raises(error) as caught:
        read(tmp_path / name)
    assert isinstance(caught.value, (UserError, SizeUnknown)) and name.partition(".")[0] in str(caught.value)


def test_words_of_a_deep_tokenizer_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(DEEP)
    assert local_tokens({"type": "huggingface", "path": str(tmp_path)}) is None

"""Zyda's and RedPajama v1's formulas, counted by hand, and counts of terms against plain loops."""

from __future__ import annotations

import pytest

pytest.importorskip("datatrove")

from datatrove.data import Document  # noqa: E402

from megatron.curation.signals import (  # noqa: E402
    OTHER,
    TextViews,  # noqa: E402
    list_signals,
)
from megatron.curation.stages import STAGES  # noqa: E402


def value(name: str, text: str) -> float | None:
    return OTHER[name](TextViews(text))


def test_zydas_signals_counted_by_hand() -> None:
    assert value("zyda_mean_word_length", "one two-three/x.y") == 2.6  # 3, 3, 5, 1, 1
    assert value("zyda_mean_word_length", "a  b") == 0.66666667  # the empty word between two spaces counts
    assert value("zyda_fraction_non_alphanumeric", "a_b! ?") == round(2 / 6, 8)  # "_" is a word character
    assert value("zyda_fraction_numerical", "a1b22") == 0.6
    assert value("zyda_repeated_characters", "aaaaaaa bbbbbb __________") == 1  # 7 a, 6 b, and "_" is collapsed first
    assert value("zyda_length", "-" * 30 + "x") == 2
    assert value("zyda_xml_count", "<xml xmlns") == 2
    assert value("zyda_xml_declarations", "<?xml version= xml version= <?xml  version=") == 2  # as it is published
    assert value("zyda_lorem_ipsum_count", "lorem ipsum Lorem ipsum") == 1
    assert value("zyda_https_per_character", "https://a.b" + " " * 40) == round(1 / 12, 8)
    assert value("zyda_www_per_character", "www.a wwwXb") == round(2 / 11, 8)
    assert value("zyda_angle_brackets_per_character", "a<b<") == 0.5
    assert value("zyda_json_keys_per_character", '{"a": 1}') == 0.125
    assert [value(name, "") for name in ("zyda_fraction_numerical", "zyda_www_per_character")] == [None, None]


def test_lines_of_code() -> None:
    text = "short\n" + "x" * 30 + "\n\n"
    assert value("code_longest_line", text) == 30 and value("code_mean_line", text) == round(35 / 3, 8)
    assert value("code_alphanumeric_fraction", "ab (1)") == 0.5
    assert value("code_longest_line", "") is None


def test_terms_of_a_list() -> None:
    signals = list_signals("bad", ["ab", "cd ef", "ab c"])
    view = TextViews("ab cd ef AB. xab ab cd")
    # Words: ab, cd ef, ab, ab (of "xab" not). And "ab c" is no n-gram here.
    assert signals["list.bad.words"](view) == 4
    assert signals["list.bad.word_fraction"](view) == round(2 / 8, 8)  # raw words, with their case
    # As parts of the text, each term by itself: "ab" 3 times, "ab c" twice, and "cd ef".
    assert signals["list.bad.count"](view) == 6
    assert signals["list.bad.per_character"](view) == round(6 / len(view.text), 8)


def test_keep_with_a_list(tmp_path) -> None:
    (tmp_path / "terms.txt").write_text("the\nof\n")
    kind = STAGES["keep"]
    options = {"signals": {"list.stop.word_fraction": [0.25, 1]}, "lists": {"stop": str(tmp_path / "terms.txt")}}
    work = kind.work(kind.options(**options))
    assert work(Document("the end of it", "a")) is None
    assert work(Document("The end Of it all", "a")).reason == "list.stop.word_fraction below 0.25"
    wrong = kind.options(signals={"list.stap.words": [0, 1]}, lists={"stop": str(tmp_path / "nothing.txt")})
    assert {each.key for each in kind.rules(wrong, "keep", "")} == {"keep.lists.stop", "keep.signals.list.stap.words"}

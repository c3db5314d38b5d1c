"""Quality signals against values counted by hand and values of the published code."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("datatrove")

from megatron.curation.signals import (  # noqa: E402
    DOCUMENT,
    LINES,
    TextViews,
    list_signals,  # noqa: E402
    normalised,
)

A = (
    "The quick brown fox jumps.\nThe quick brown fox jumps!\n• bullet Item 12 ...\n"
    "JAVASCRIPT is javascript 3.14 #tag {x}\n"
)
B = " ".join(["a b c d e f"] * 3)
# By RedPajama v2's published program.
PUBLISHED_A = {
    "rps_doc_word_count": 20,
    "rps_doc_frac_all_caps_words": 0.03571429,
    "rps_doc_frac_lines_end_with_ellipsis": 0.25,
    "rps_doc_frac_no_alph_words": 0.39285714,
    "rps_doc_frac_unique_words": 0.7,
    "rps_doc_mean_word_length": 4.2,
    "rps_doc_num_sentences": 5,
    "rps_doc_symbol_to_word_ratio": 0.07142857,
    "rps_doc_unigram_entropy": 2.57984397,
    "rps_doc_frac_chars_dupe_5grams": 0.5,
    **{f"rps_doc_frac_chars_dupe_{n}grams": 0.0 for n in range(6, 11)},
    "rps_doc_frac_chars_top_2gram": 0.19047619,
    "rps_doc_frac_chars_top_3gram": 0.30952381,
    "rps_doc_frac_chars_top_4gram": 0.38095238,
    "rps_doc_curly_bracket": 0.01754386,
    "rps_doc_lorem_ipsum": 0.0,
}
LINES_A = {
    "rps_lines_ending_with_terminal_punctution_mark": [1, 1, 1, 0],
    "rps_lines_javascript_counts": [0, 0, 0, 2],
    "rps_lines_num_words": [5, 5, 4, 6],
    "rps_lines_numerical_chars_fraction": [0, 0, 0.125, 0.08823529],
    "rps_lines_start_with_bulletpoint": [0, 0, 1, 0],
    "rps_lines_uppercase_letter_fraction": [0.03703704, 0.03703704, 0.04761905, 0.25641026],
}


def test_the_published_program_gives_the_same():
    view = TextViews(A)
    assert {name: signal(view) for name, signal in DOCUMENT.items()} == PUBLISHED_A
    assert {name: signal(view) for name, signal in LINES.items()} == LINES_A


def test_a_repeated_text_counts_each_character_once():
    view = TextViews(B)
    found = {name: signal(view) for name, signal in DOCUMENT.items()}
    assert found["rps_doc_unigram_entropy"] == round(math.log(6), 8)
    assert [found[f"rps_doc_frac_chars_dupe_{n}grams"] for n in range(5, 11)] == [1.0] * 6
    assert [found[f"rps_doc_frac_chars_top_{n}gram"] for n in (2, 3, 4)] == [0.33333333, 0.5, 0.66666667]


def test_counted_by_hand():
    """Nine words: 'one' three times, 'two' twice, and four others. Two of the raw words have no letter."""
    view = TextViews("One two, one TWO one!\nLorem ipsum 4 5…")
    assert view.words == ["one", "two", "one", "two", "one", "lorem", "ipsum", "4", "5…"]
    assert view.raw_words == ["One", "two", ",", "one", "TWO", "one", "!", "Lorem", "ipsum", "4", "5", "…"]
    assert DOCUMENT["rps_doc_frac_unique_words"](view) == round(6 / 9, 8)
    assert DOCUMENT["rps_doc_frac_no_alph_words"](view) == round(5 / 12, 8)
    assert DOCUMENT["rps_doc_frac_all_caps_words"](view) == round(1 / 12, 8)
    assert DOCUMENT["rps_doc_symbol_to_word_ratio"](view) == round(1 / 12, 8)
    assert DOCUMENT["rps_doc_lorem_ipsum"](view) == round(1 / len("one two one two one lorem ipsum 4 5…"), 8)
    assert list_signals("x", ["one", "two"])["list.x.word_fraction"](view) == round(3 / 12, 8)


def test_a_text_without_words_has_the_published_values():
    """RedPajama v2's program gives 0 for shares of repetitions, and None for means over words."""
    view = TextViews("  \n ")
    undefined = {name for name, signal in DOCUMENT.items() if signal(view) is None}
    assert undefined == {
        "rps_doc_mean_word_length",
        "rps_doc_symbol_to_word_ratio",
        "rps_doc_frac_no_alph_words",
        "rps_doc_frac_unique_words",
        "rps_doc_unigram_entropy",
        "rps_doc_frac_all_caps_words",
    }
    assert all(DOCUMENT[name](view) == 0 for name in DOCUMENT.keys() - undefined)
    assert [signal(TextViews("")) for signal in LINES.values()] == [[]] * len(LINES)


def test_normalised_is_nfd_without_ascii_punctuation():
    assert normalised("  Ä-b!  “c”\t\nd ") == "a\u0308b “c” d"

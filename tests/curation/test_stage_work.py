"""Stages on single documents, against texts that were counted by hand and other implementations."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from datatrove.data import Document  # noqa: E402

from megatron.curation.stages import STAGES  # noqa: E402
from megatron.curation.stages.texts import RUNS  # noqa: E402
from megatron.data.overlap.units import words  # noqa: E402


def stage(name: str, **options):
    """Applies a stage to a text. Gives what it returned and the text afterwards."""
    kind = STAGES[name]
    work = kind.work(kind.options(**options))

    def apply(text: str):
        document = Document(text, "s/a:1", metadata={"source": "s"})
        return work(document), document.text

    return apply


def zyda_runs(text: str) -> str:
    """Zyda's transform as it is published: one substitution for each character, in its order."""
    for character, length in RUNS.items():
        text = re.sub(f"{re.escape(character)}{{{length},}}", lambda match: match[0][0], text)
    return text


def test_runs_collapse_as_in_zydas_transform() -> None:
    collapse, draw = stage("collapse"), random.Random(5)
    assert collapse("a" + "-" * 9 + "b") == (None, "a---------b") and collapse("a" + "-" * 10 + "b") == (None, "a-b")
    assert collapse(" " * 39)[1] == " " * 39 and collapse(" " * 40)[1] == " "
    for _ in range(200):
        text = "".join(draw.choice([*RUNS, "x"]) * draw.choice((1, 9, 10, 11, 19, 20, 40)) for _ in range(12))
        assert collapse(text)[1] == zyda_runs(text)
    assert stage("collapse", runs={"=": 3})("a==b===c----------")[1] == "a==b=c----------"
    assert stage("collapse", runs={})("-" * 50)[1] == "-" * 50


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mail a.b+c@mail.example.org, now", "mail email@example.com, now"),
        ("<me@x.io>", "<email@example.com>"),
        ("é_1@sub-domain.co.uk.", "email@example.com."),
        (
            "_me@x.io_ ...me@x.io a..b@x.io a.@x.io",
            "email@example.com_ ...email@example.com" + " email@example.com" * 2,
        ),
        ("写信给 me@x.io。me@x.io是", "写信给 email@example.com。email@example.com是"),
        ("me@x.io2", "email@example.com2"),
        ("no@domain and @name and a@b", "no@domain and @name and a@b"),
        ("ask 8.8.8.8 or 8.8.4.4!", "ask 192.0.2.1 or 192.0.2.1!"),
        ("10.0.0.1, 127.0.0.1, 192.168.1.1 stay", "10.0.0.1, 127.0.0.1, 192.168.1.1 stay"),
        ("version 1.2.3.4.5 and 999.1.1.1 and 08.8.8.8", "version 1.2.3.4.5 and 999.1.1.1 and 08.8.8.8"),
        ("at 8.8.8.8.", "at 192.0.2.1."),
    ],
)
def test_personal_data(text: str, masked: str) -> None:
    pii = stage("pii")
    assert pii(text) == (None, masked) and pii(masked)[1] == masked  # and once more changes nothing


def test_masks_of_ones_own_and_long_texts_without_any() -> None:
    """The replacement is a text and no template. The time is linear: this text has 400,000 beginnings of addresses."""
    assert stage("pii", email=r"\1", ip=r"\g<0>")("a@b.org 8.8.8.8")[1] == r"\1 \g<0>"
    for text in ("a." * 200_000 + "@" + "a-" * 200_000, "." * 400_000, "a" + "." * 200_000 + "a" + "." * 200_000):
        assert stage("pii")(text)[1] == text


def test_terms(tmp_path: Path) -> None:
    (tmp_path / "terms.txt").write_text("Ebola\n smallpox \n\nc++\nebola\n")
    terms = {"file": str(tmp_path / "terms.txt")}
    one, two, whole = (
        stage("blocklist", **terms),
        stage("blocklist", least=2, **terms),
        stage("blocklist", words=True, **terms),
    )
    assert one("nothing here")[0] is None and one("EBOLAVIRUS")[0].detail == "ebola"
    assert two("ebola ebola ebola")[0] is None  # different terms count, and not their occurrences
    assert two("Smallpox, ebola")[0] == ("has at least 2 of the terms", "ebola, smallpox")
    assert (
        whole("ebolavirus")[0] is None
        and whole("an ebola virus")[0]
        and whole("(C++)")[0]
        and whole("c++x, xc++")[0] is None
    )


def filler(count: int, seed: int = 1) -> str:
    """Sentences without a repeated n-gram of two words, of words that datatrove's filters accept."""
    draw = random.Random(seed)
    made = ["".join(draw.choice("bcdfglmnprst") + draw.choice("aeiou") for _ in range(3)) for _ in range(count)]
    return "the " + " ".join(made[: count // 2]) + " of " + " ".join(made[count // 2 :]) + "."


LONG = filler(60)
GOPHER = {
    "gopher_short_doc": filler(40),
    "gopher_below_avg_threshold": "the of " + "a b " * 60,
    "gopher_above_avg_threshold": "the of " + "abcdefghijkl " * 60,
    "gopher_too_many_hashes": LONG + " #" * 8,
    "gopher_too_many_ellipsis": LONG + " w..." * 9,
    "gopher_too_many_bullets": "\n".join("- " + each for each in LONG.split()),
    "gopher_too_many_end_ellipsis": "\n".join([*(each + "…" for each in LONG.split()[:2]), *[LONG] * 2]),
    "gopher_below_alpha_threshold": LONG + " 12345" * 20,
    "gopher_enough_stop_words": LONG.replace("the", "that").replace(" of ", " or "),
}


def test_each_rule_of_gopher_quality() -> None:
    gopher = stage("gopher_quality")
    assert gopher(LONG)[0] is None
    assert {reason: gopher(text)[0].reason for reason, text in GOPHER.items()} == {each: each for each in GOPHER}
    assert stage("gopher_quality", min_doc_words=40)(filler(40))[0] is None
    assert stage("gopher_quality", max_doc_words=60)(LONG)[0].reason == "gopher_long_doc"
    assert stage("gopher_quality", min_stop_words=1)(GOPHER["gopher_enough_stop_words"])[0] is None


def test_gopher_repetition_by_counts() -> None:
    """Shares of characters and lines on both sides of their bounds, counted by plain loops."""
    gopher = stage("gopher_repetition")
    assert gopher(LONG)[0] is None
    unique = [f"line {each} {filler(30 + each, each + 2)}" for each in range(7)]
    assert gopher("\n".join([*unique, *["short one here"] * 4]))[0] is None  # 3 of 11 lines repeat one
    assert gopher("\n".join([*unique, *["short one here"] * 5]))[0].reason == "dup_line_frac"  # 4 of 12
    assert gopher("\n\n".join([*unique, *["short one here"] * 5]))[0].reason == "dup_para_frac"
    repeated = "\n".join([LONG, unique[0], unique[0], unique[1]])
    share = len(unique[0]) / len(repeated)
    assert (gopher(repeated)[0] is not None) == (share > 0.2)
    assert gopher("\n".join([unique[6], unique[6], *unique[:2]]))[0].reason == "dup_line_char_frac"
    pair = LONG + " buy now" * 9
    assert 9 * len("buy now") / len(pair) < 0.2 < 20 * len("buy now") / len(LONG + " buy now" * 20)
    assert gopher(LONG + " buy now" * 20)[0].reason == "top_2_gram"
    ten = " ".join(LONG.split()[3:14])
    assert gopher(f"{LONG} {ten}")[0].reason.startswith("duplicated_")


def test_fineweb_quality_by_counts() -> None:
    fineweb = stage("fineweb_quality")
    body = [f"This sentence is number {each}, and it is {'long ' * 5}enough." for each in range(9)]
    assert fineweb("\n".join(body))[0] is None
    open_ended = [each[:-1] for each in body]
    assert fineweb("\n".join([*open_ended[:7], body[8]]))[0] is None  # 1 of 8 lines ends: 0.125
    assert fineweb("\n".join([*open_ended[:8], body[8]]))[0].reason == "line_punct_ratio"  # 1 of 9: 0.111
    short = [f"Short {each}." for each in range(18)]
    assert fineweb("\n".join([*body, *short]))[0] is None  # 18 of 27 lines: 0.667
    assert fineweb("\n".join([*body, *short, "One more."]))[0].reason == "short_line_ratio"  # 19 of 28: 0.679
    assert fineweb("\n".join([*body, body[0]]))[0].reason == "char_dup_ratio"
    assert fineweb("\n" * 200 + "\n".join(body))[0].reason == "list_ratio"


def test_decontamination_against_brute_force(tmp_path: Path) -> None:
    draw = random.Random(2)

    def text(length: int) -> str:
        return " ".join(draw.choice(("Red,", "green", "BLUE", "grey.")) for _ in range(length))

    examples = [text(draw.randrange(3, 12)) for _ in range(6)]
    (tmp_path / "e.txt").write_text("\n\n".join(examples))
    search = stage("decontaminate", file=str(tmp_path / "e.txt"), n=5)

    def grams(of: str) -> set[tuple[str, ...]]:
        own = words(of)
        return {tuple(own[first : first + 5]) for first in range(len(own) - 4)}

    hits = 0
    for _ in range(200):
        document = text(draw.randrange(1, 40))
        names = [str(number) for number, each in enumerate(examples, 1) if grams(each) & grams(document)]
        gone, after = search(document)
        hits += bool(names)
        assert after == document and (gone is None) == (not names)
        assert gone is None or gone.detail.removeprefix("example ") in names
    assert 20 < hits < 180

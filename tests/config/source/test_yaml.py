"""YAML as version 1.2 reads it, with the line of every key."""

from __future__ import annotations

import math

import pytest

from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse, read_file, read_override


def value(text: str):
    result, _, problems = parse(text, lambda line: Origin("file", file="f", line=line))
    assert not problems, problems
    return result


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1e-8", 1e-8),
        ("1.0e-8", 1e-8),
        ("1E5", 1e5),
        ("-1e+3", -1e3),
        (".5", 0.5),
        ("5.", 5.0),
        ("+0.1", 0.1),
        ("6.02e23", 6.02e23),
        ("12", 12),
        ("-3", -3),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("0x", "0x"),
        ("1.2.3", "1.2.3"),
        ('"1e-8"', "1e-8"),
        ("'true'", "true"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ('"a\\tb"', "a\tb"),
        ("=", "="),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        ("{}", {}),
        ("[]", []),
        (".inf", math.inf),
        ("-.inf", -math.inf),
    ],
)
def test_scalars(text, expected):
    found = value(f"k: {text}")["k"]
    assert found == expected and type(found) is type(expected)


def test_not_a_number():
    assert math.isnan(value("k: .nan")["k"])


def test_names_stay_text():
    assert value("no: 1\n5: 2\n1e3: 3\nnull: 4") == {"no": 1, "5": 2, "1e3": 3, "null": 4}


def test_lines_of_keys_and_items():
    text = "a:\n  b: 1\n  c:\n    - x\n    - {d: 2,\n       e: 3}\n"
    _, places, _ = parse(text, lambda line: Origin("file", file="f.yml", line=line))
    assert {path: place.line for path, place in places.items()} == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "d"): 5,
        ("a", "c", 1, "e"): 6,
    }


def test_aliases_are_copies_in_value():
    assert value("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\n\n", "null"])
def test_empty_files_are_empty_mappings(text, tmp_path):
    (tmp_path / "e.yml").write_text(text)
    source = read_file(str(tmp_path / "e.yml"))
    assert source.values == {} and not source.problems


@pytest.mark.parametrize(
    "content, says",
    [
        (b"\xff\xfea", "not UTF-8"),
        (b"- a\n- b\n", "a mapping of sections"),
        (b"text", "a mapping of sections"),
        (b"a: 1\n b: 2\n", "e.yml:2"),
        (b"a: 'x\n", "e.yml:"),
        (b"a: \x07\n", "control character"),
        (b"? [x]\n: 1\n", "a key must be a word"),
    ],
)
def test_what_is_no_configuration(content, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.yml").write_bytes(content)
    source = read_file("e.yml")
    assert len(source.problems) == 1 and says in str(source.problems[0])


def test_byte_order_mark(tmp_path):
    (tmp_path / "e.yml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(str(tmp_path / "e.yml")).values == {"a": 1}


def test_json_is_yaml(tmp_path):
    (tmp_path / "e.yml").write_text('# old style\n{\n  "a-b": 1.0e-8,\n  "c": {"d": [0.9, 0.95]},\n}\n')
    assert read_file(str(tmp_path / "e.yml")).values == {"a-b": 1e-8, "c": {"d": [0.9, 0.95]}}


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("a.b=1e-3", {"a": {"b": 1e-3}}),
        ("a=", {"a": None}),
        ("a.b=x=y", {"a": {"b": "x=y"}}),
        ("a=[1, {b: 2}]", {"a": [1, {"b": 2}]}),
        ("a.b={c: true}", {"a": {"b": {"c": True}}}),
        ('a="5"', {"a": "5"}),
    ],
)
def test_overrides(argument, expected):
    source = read_override(argument)
    assert source.values == expected and not source.problems
    assert source.origin(("a",)).kind == "argument"


@pytest.mark.parametrize("argument", ["=1", "a..b=1", ".a=1", "justtext"])
def test_overrides_without_a_key(argument):
    assert "key.path=value" in str(read_override(argument).problems[0])


def test_an_override_that_is_no_yaml():
    problem = read_override("a.b=[1").problems[0]
    assert problem.key == "a.b" and "not YAML" in problem.rule


def test_bytes_that_are_no_text_are_told():
    """As Python hands over an argument that is not UTF-8."""
    assert read_override("run.name=\udcff").problems

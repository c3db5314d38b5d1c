"""Messages, specifications, credentials: what is sent arrives as it was."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.launch.report.console import RankConsole
from megatron.launch.wire import protocol
from megatron.launch.wire.protocol import LIMIT, Lines, decode, encode, encode_text
from megatron.launch.wire.specification import Host, Seat, Specification, seat_in

TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=3000)


@given(TEXT)
def test_text_of_any_kind_and_length(text):
    text = text.encode("utf-8", "replace").decode()
    lines = list(encode_text({"type": "output", "host": 7, "rank": 3, "stream": 1}, text))
    assert "".join(decode(line[:-1])["text"] for line in lines) == text
    assert all(len(line) <= LIMIT and line.count(b"\n") == 1 for line in lines)


@given(st.binary(max_size=3000))
def test_bytes_of_any_kind(data):
    lines = encode_text({"type": "output", "host": 0, "rank": 0, "stream": 2}, data.decode("utf-8", "surrogateescape"))
    assert "".join(decode(line[:-1])["text"] for line in lines).encode("utf-8", "surrogateescape") == data


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")), max_size=20), st.integers(1, 17))
def test_lines_do_not_depend_on_how_bytes_come(lines, step):
    stream, collected, feeder = b"".join(line + b"\n" for line in lines) + b"rest", [], Lines()
    for start in range(0, len(stream), step):
        collected += feeder.feed(stream[start : start + step])
    assert collected == lines and feeder.rest() == b"rest" and feeder.rest() == b""


@pytest.mark.parametrize(
    "line", [b"", b"srun: error: x", b"\x1e", b"\x1enot json", b"\x1e[1]", b"\x1e{}", b'{"type":"done"}']
)
def test_chatter_is_told_from_messages(line):
    assert decode(line) is None


ANY = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)


@settings(max_examples=50)
@given(st.lists(ANY, max_size=20), st.dictionaries(ANY, ANY, max_size=8), ANY)
def test_a_specification_comes_back(words, variables, configuration):
    job = Specification(
        (Host("a", (0, 2)), Host("b", (1,))),
        ("python", *words),
        "/x y",
        variables,
        configuration,
        terminal=((24, 80), None),
        grace=1.5,
        wrapper=True,
        attempt=2,
    )
    whole, own = (decode(encode(job.to_message(index))[:-1]) for index in (None, 1))
    assert Specification.from_message(whole) == job and Specification.from_message(own) == replace(job, hosts=())
    assert Specification.from_message(own).sha256 == job.sha256
    seats = [seat_in(whole, job, 1, None), seat_in(whole, job, None, "b"), seat_in(own, job, None, None)]
    assert seats == 3 * [Seat(1, Host("b", (1,)), hosts=2, first_rank=2, world_size=3)]


def test_a_host_without_a_seat_is_refused():
    job = Specification((Host("a", (0,)), Host("b", (1,))), (), "/")
    for index in (None, -1, 2):
        with pytest.raises(ValueError, match="is not one of the job's 2 hosts"):
            seat_in(job.to_message(None), job, index, None)
    with pytest.raises(ValueError, match="which must be one of the job's hosts: a, b"):
        seat_in(job.to_message(None), job, None, "c")


def test_ranks_are_numbered_through_the_hosts():
    job = Specification((Host("a", (0, 1)), Host("b", (3,)), Host("c", (0, 1, 2))), (), "/")
    assert [job.first_rank(index) for index in range(3)] == [0, 2, 3] and job.world_size == 6


def test_another_version_is_refused(monkeypatch):
    message = Specification((Host("a", (0,)),), (), "/").to_message(0)
    assert (message["type"], message["index"]) == ("specification", 0) and "job" in message  # what every version reads
    monkeypatch.setattr(protocol, "VERSION", protocol.VERSION + 1)
    with pytest.raises(ValueError, match="version"):
        Specification.from_message(message)


def _standard_output(monkeypatch):
    """Put something in the place of sys.stdout. Returns what has been written to it, when called."""

    class Sink(io.StringIO):
        buffer = property(lambda self: self)

        def write(self, data):
            return super().write(data.decode())

    sink = Sink()
    monkeypatch.setattr("sys.stdout", sink)
    return sink.getvalue


def test_output_of_other_ranks_is_shown_in_whole_lines(monkeypatch):
    shown = _standard_output(monkeypatch)
    console = RankConsole(plain=False)
    console.show("a", 0, 1, "one\ntw")
    console.show("b", 5, 1, "five\n")
    console.show("a", 0, 1, "o\n")
    assert shown() == "[a:0] one\n[b:5] five\n[a:0] two\n"


def test_a_line_of_another_rank_waits_for_the_end_of_rank_0s_line(monkeypatch):
    shown = _standard_output(monkeypatch)
    console = RankConsole(plain=True)
    console.show("a", 0, 1, "hello from 0")  # an unbuffered print writes its line's end by itself
    console.show("a", 1, 1, "one\n")
    console.show("a", 2, 1, "two\n")
    console.settle(60.0)
    assert shown() == "hello from 0"
    console.show("a", 0, 1, "\nnext")
    assert shown() == "hello from 0\n[a:1] one\n[a:2] two\nnext"


def test_a_line_without_end_does_not_silence_the_other_ranks(monkeypatch):
    shown = _standard_output(monkeypatch)
    console = RankConsole(plain=True)
    console.show("a", 0, 1, "\r 10 %")
    console.show("a", 1, 1, "one\n")
    console.settle(0.0)
    console.settle(0.0)
    console.show("a", 1, 1, "two\n")
    console.show("a", 0, 1, "\r 20 %")
    assert shown() == "\r 10 %\n[a:1] one\n[a:1] two\n\r 20 %"


def test_a_line_without_an_end_is_not_kept_for_ever():
    lines, sent = Lines(longest=1000), []
    for _ in range(100):
        sent += lines.feed(b"x" * 64)
        assert sum(map(len, lines._parts)) <= 1000
    sent += [*lines.feed(b"y\nlast"), lines.rest()]
    assert b"".join(sent) == b"x" * 6400 + b"ylast" and sent[-1] == b"last"
    assert lines.rest() == b""

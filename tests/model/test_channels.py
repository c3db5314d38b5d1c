"""Side channels of the stream: where they live, and that stages hand them over."""

from __future__ import annotations

import pytest
import torch

from megatron.model.stream import Channel, Stream, StreamForm, live_channels


def test_a_channel_lives_from_its_maker_to_its_last_user():
    value, first = Channel(3, whole=True), Channel(4, embedded=True)
    used = [{}, {"value": value}, {}, {"value": value, "first": first}, {}]
    names = [sorted(each) for each in live_channels(used)]
    assert names == [["first"], ["first"], ["first", "value"], ["first", "value"], [], []]
    assert live_channels([{}, {}]) == [{}, {}, {}]
    assert live_channels([{"value": value}]) == [{}, {}]  # a block that makes it needs no carrying


@pytest.mark.parametrize("cut", [1, 2])
def test_joined_floats_come_apart_again(cut: int):
    form = StreamForm(documents=True, channels={"a": Channel(3), "b": Channel(6, whole=True)})
    b, whole = 2, 8
    stream = Stream(
        torch.randn(b, whole // cut, 5),
        documents=torch.ones(b, whole, dtype=torch.int64),
        channels={"a": torch.randn(b, whole // cut, 3), "b": torch.randn(b, whole, 6), "over": torch.randn(b)},
    )
    joined = form.join(form.pack(stream))
    assert len(joined) == 2 and joined[0].shape == (b, whole // cut * 8 + whole * 6)
    back = form.unpack(form.split(joined, 5, cut))
    assert back.hidden.equal(stream.hidden) and back.documents.equal(stream.documents)
    assert sorted(back.channels) == ["a", "b"] and all(
        back.channels[name].equal(stream.channels[name]) for name in "ab"
    )


def test_without_channels_nothing_is_copied():
    form = StreamForm(samples=True)
    packed = form.pack(Stream(torch.randn(2, 3, 4), samples=torch.arange(2)))
    assert form.join(packed) is packed and form.split(packed, 4, 1) is packed

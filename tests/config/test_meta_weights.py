"""Headers of files of small_fc_lopt's weights that must not be trusted."""

from __future__ import annotations

import json
import struct

import pytest
from more_optimizers.small_fc_lopt.network import Network, check_header


def written(tmp_path, header: str | bytes):
    content = header.encode() if isinstance(header, str) else header
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(content)) + content)
    return file


def header(**changes: str) -> str:
    """Of the network, as JSON. A tensor's shape may be any text."""
    shapes = {name: json.dumps(shape) for name, shape in Network(32, 1).shapes.items()} | changes
    return "{" + ", ".join(f'"{name}": {{"shape": {shape}}}' for name, shape in shapes.items()) + "}"


def test_the_header_of_the_network_passes(tmp_path):
    check_header(written(tmp_path, header()))


@pytest.mark.parametrize(
    "shape",
    ["[1e999, 39]", "[32, 39.7]", '[32, "39"]', "[32.0, 39]", "[32, -39]", "[NaN, 39]", "39", '"32"', "{}", "null"],
)
def test_sizes_that_are_no_whole_numbers_are_refused(shape, tmp_path):
    file = written(tmp_path, header(**{"network.input.weight": shape}))
    with pytest.raises(
        ValueError, match=r"must be a safetensors file, and the header of a\.safetensors cannot be read"
    ):
        check_header(file)


def test_true_is_no_size(tmp_path):
    """JSON's true is equal to 1."""
    file = written(tmp_path, header(**{"network.input.bias": "[true]"}))
    with pytest.raises(ValueError, match=r"the header of a\.safetensors cannot be read"):
        check_header(file)


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {}}', "[" * 5000, b"\xff\xfe"])
def test_headers_of_another_form_are_refused(content, tmp_path):
    with pytest.raises(ValueError, match=r"the header of a\.safetensors cannot be read"):
        check_header(written(tmp_path, content))

"""Hugging Face folders of strangers: what is wrong with a file is said in a sentence, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.format.container import DTYPES
from megatron.checkpoint.hf import importer
from megatron.checkpoint.hf.config import architecture_of, names
from megatron.checkpoint.hf.convert import match, plan
from megatron.checkpoint.hf.importer import logical_tensors, settings
from tests.checkpoint.hf.test_hf_tools import tool
from tests.model.parity import on_disk
from tests.model.test_parity import CASES

SHORTEST = {CASES[name].model_type: name for name in reversed(CASES)}
DEEP = 100_000 * "["
Header = dict[str, dict]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    hf.AutoModelForCausalLM.from_config(CASES[SHORTEST["llama"]]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Message about a folder that is refused."""
    out = folder.parent / "out"
    assert tool("from_hf").main([str(folder), str(out), *more]) == 2
    assert not out.exists() or more
    said = capsys.readouterr().err
    assert said.startswith("from_hf: ") and (str(folder) in said or "given: model." in said)
    return said


def parts(file: Path) -> tuple[Header, bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def joined(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def first(header: Header) -> dict:
    """The entry of a matrix whose bytes come first."""
    return min((each for name, each in header.items() if name != "__metadata__"), key=lambda each: each["data_offsets"])


def entry(**changes: object) -> Callable[[Header, bytes], bytes]:
    """A file whose first tensor is described otherwise."""

    def made(header: Header, data: bytes) -> bytes:
        first(header).update(changes)
        return joined(header, data)

    return made


def shifted(begin: int, end: int) -> Callable[[Header, bytes], bytes]:
    def made(header: Header, data: bytes) -> bytes:
        place = first(header)["data_offsets"]
        first(header)["data_offsets"] = [place[0] + begin, place[1] + end]
        return joined(header, data)

    return made


def overlapping(header: Header, data: bytes) -> bytes:
    """A second name for the bytes of the first tensor."""
    return joined({**header, "second": dict(first(header))}, data)


DAMAGED: dict[str, tuple[Callable[[Header, bytes], bytes], str]] = {
    "an unknown type": (entry(dtype="F4"), "has the type 'F4'. It must be one of F64, F32"),
    "a type that is no word": (entry(dtype=["F32"]), "damaged"),
    "whole numbers": (entry(dtype="I32"), "has the type int32. Weights must be float64, float32"),
    "a negative size": (entry(shape=[-1, 4]), "It must be a list of sizes"),
    "a size of half": (entry(shape=[0.5, 4]), "It must be a list of sizes"),
    "a shape that is a word": (entry(shape="61"), "It must be a list of sizes"),
    "a huge size": (entry(shape=[2**62, 2**62]), "It must have"),
    "a size beyond all": (entry(shape=[2**70]), "It must be a list of sizes"),
    "dimensions beyond all": (entry(shape=[1] * 100), "It must be a list of sizes"),
    "another size": (entry(shape=[1]), "It must have 4 bytes"),
    "an end beyond the file": (shifted(0, 2**50), "It must have"),
    "a place beyond the file": (shifted(2**50, 2**50), "its header promises"),
    "a place before the file": (shifted(-4, -4), "It must have"),
    "places that are words": (entry(data_offsets=["0", "8"]), "damaged"),
    "one place": (entry(data_offsets=[0]), "damaged"),
    "no places": (lambda header, data: joined({"a": {"dtype": "F32", "shape": []}}, data), "'data_offsets' is missing"),
    "bytes of two tensors": (overlapping, "begins at byte"),
    "cut off": (lambda header, data: joined(header, data)[:-4], "the file has"),
    "too long": (lambda header, data: joined(header, data + b"1234"), "the file has"),
    "nothing": (lambda header, data: b"", "too few for a safetensors file"),
    "no JSON": (lambda header, data: joined(b"{]", data), "this is not JSON"),
    "no text": (lambda header, data: joined(b"\xff\xfe\xff", data), "damaged"),
    "a list": (lambda header, data: joined([], data), "damaged"),
    "a deep header": (lambda header, data: joined(DEEP.encode(), data), "nested too deeply"),
    "a header longer than the file": (lambda header, data: (2**40).to_bytes(8, "little") + data, "not a whole"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_of_tensors_is_named(case: str, llama: Path, capsys) -> None:
    damage, words = DAMAGED[case]
    file = llama / "model.safetensors"
    file.write_bytes(damage(*parts(file)))
    said = refused(llama, capsys)
    assert words in said and ("model.safetensors" in said or "lm_head" in said or "model." in said)
    if "int32" not in said:
        assert "fetch or save the file again" in said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "\xff" * 9, "[1", '"' + 9 * "\\ud800" + '"'])
def test_json_of_strangers_is_refused_in_words(name: str, text: str, llama: Path, capsys) -> None:
    (llama / name).write_bytes(text.encode("latin-1"))
    assert name in refused(llama, capsys)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 100000, not 1000000000000"),
        ({"num_hidden_layers": 90_000}, "its configuration must have at most "),
        ({"num_hidden_layers": 1}, "left over: model.layers.1."),
        ({"vocab_size": 10**6}, "must have (1000000, "),
        ({"vocab_size": 2**62}, "sizes of a model must be at most"),
        ({"intermediate_size": 24}, "must have (24, 32)"),
        ({"num_key_value_heads": 1}, "k_proj"),
    ],
)
def test_a_configuration_of_another_model_is_refused(changes: dict, words: str, llama: Path, capsys) -> None:
    own = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**own, **changes}))
    assert words in refused(llama, capsys)


def test_gate_and_up_are_not_cut_elsewhere(llama: Path, capsys) -> None:
    """Together they have the rows of ours, so that only each one's shape differs."""
    file = llama / "model.safetensors"
    header, data = parts(file)
    low, high = (header[f"model.layers.0.mlp.{each}_proj.weight"] for each in ("gate", "up"))
    (rows, columns), (begin, end) = low["shape"], low["data_offsets"]
    assert high["data_offsets"][0] == end
    low["shape"], high["shape"] = [rows - 2, columns], [rows + 2, columns]
    low["data_offsets"][1] = high["data_offsets"][0] = end - 2 * (end - begin) // rows
    file.write_bytes(joined(header, data))
    said = refused(llama, capsys)
    assert f"has the shape ({rows - 2}, {columns}), and must have ({rows}, {columns})" in said


class Shapes:
    """A source that has only shapes."""

    def __init__(self, found: dict[str, torch.Tensor]) -> None:
        self.path = Path("folder")
        self.types = {name: tensor.dtype for name, tensor in found.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        self.places = dict.fromkeys(found, self.path)


@pytest.mark.parametrize("kind", sorted(names()))
def test_reversed_shapes_are_refused_whatever_the_architecture(kind: str, tmp_path: Path) -> None:
    """Every tensor in turn, with transformers' own shapes for all others. A transposed square cannot be detected."""
    theirs = CASES[SHORTEST[kind]]
    theirs.save_pretrained(tmp_path)
    found = on_disk(hf.AutoModelForCausalLM.from_config(theirs).state_dict(), kind)
    resolved = settings(tmp_path)
    logical, architecture = logical_tensors(resolved), architecture_of(theirs, ())
    steps = plan(architecture, logical, resolved.config.model)
    source = Shapes(found)
    further = architecture.further(found, len(resolved.config.model.blocks))
    there = match(architecture, steps, [name for name in found if name not in further], read=found.__getitem__)
    importer._check_shapes(Path("folder"), steps, logical, source, there)  # as transformers has them
    reversed_ones = 0
    for name in {there[name] for step in steps for name in step.theirs}:
        shape = source.shapes[name]
        for other in {shape[::-1], (*shape, 1), shape[:-1], ()} - {shape}:
            source.shapes[name] = other
            with pytest.raises(CheckpointError) as caught:
                importer._check_shapes(Path("folder"), steps, logical, source, there)
            assert f"{name} has the shape {other}, and must have {shape}" in str(caught.value)
            reversed_ones += other == shape[::-1]
        source.shapes[name] = shape
    assert reversed_ones


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_weights_that_are_no_numbers_are_not_imported(value: float, kind: str, llama: Path, capsys) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {each: tensor.to(DTYPES[kind]) for each, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, llama / "model.safetensors")
    assert tool("from_hf").main([str(llama), str(llama.parent / "whole")]) == 0
    tensors[name][-1, -1] = value
    save_file(tensors, llama / "model.safetensors")
    capsys.readouterr()
    assert tool("from_hf").main([str(llama), str(llama.parent / "out")]) == 2
    assert f"{name} has values that are infinite or no numbers. All must be finite" in capsys.readouterr().err
    assert [each.name for each in sorted(llama.parent.iterdir())] == ["model", "whole"]


def test_names_that_steer_a_terminal_are_shown_and_not_printed(llama: Path, capsys) -> None:
    header, data = parts(llama / "model.safetensors")
    header["a\x1b[2Jb"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    (llama / "model.safetensors").write_bytes(joined(header, data))
    said = refused(llama, capsys)
    assert r"'a\x1b[2Jb' is no name of a tensor: it must be printable" in said and "\x1b" not in said


def test_two_names_of_one_tensor_are_refused(llama: Path, capsys) -> None:
    """`norm.weight` is that of a model that was saved without its head."""
    header, data = parts(llama / "model.safetensors")
    header["norm.weight"] = {"dtype": "F32", "shape": [32], "data_offsets": [len(data), len(data) + 128]}
    (llama / "model.safetensors").write_bytes(joined(header, data + bytes(128)))
    said = refused(llama, capsys)
    assert "norm.weight and " in said and "are two names of one tensor: keep one of them" in said

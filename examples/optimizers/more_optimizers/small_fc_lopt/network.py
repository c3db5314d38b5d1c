"""The network of the learned optimizer small_fc_lopt: which tensors a file of its weights must have. No torch here.

PyLO names them `network.input`, `network.linear_0`, ..., `network.output`, each with a weight and a bias.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FEATURES, OUTPUTS = 39, 2  # what it reads of an element, and the direction and size of its step
LARGEST = 2**26  # bytes of such a file. The published one has 10 KiB
RULE = "must be the network of small_fc_lopt, and it"
NAME = "model.safetensors"  # in a folder of Hugging Face's form
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Network:
    """Linear layers from FEATURES to `width`, `layers` from `width` to `width`, one to OUTPUTS, with ReLU between."""

    width: int
    layers: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        sizes = [("input", FEATURES, self.width)]
        sizes += [(f"linear_{number}", self.width, self.width) for number in range(self.layers)]
        sizes += [("output", self.width, OUTPUTS)]
        return {
            f"network.{name}.{what}": (rows, columns) if what == "weight" else (rows,)
            for name, columns, rows in sizes
            for what in ("weight", "bias")
        }


def network_of(shapes: Mapping[str, tuple[int, ...]]) -> Network:
    """The network whose tensors have these shapes.

    Raises:
        ValueError: it is not a network. The message names the first tensor that is missing, unknown, or of another
        shape.
    """
    first = shapes.get("network.input.weight", ())
    width = first[0] if len(first) == 2 else 0
    found = Network(width, sum(name.startswith("network.linear_") and name.endswith(".weight") for name in shapes))
    for name, shape in found.shapes.items():
        if name not in shapes:
            raise ValueError(f"{RULE} has no tensor {name}")
        if tuple(shapes[name]) != shape or width < 1:
            raise ValueError(f"{RULE} has {name} of the shape {list(shapes[name])}, not {list(shape)}")
    extra = sorted(set(shapes) - set(found.shapes))
    if extra:
        raise ValueError(f"{RULE} has a tensor {extra[0][:80]!r}, which the network has not")
    return found


def weights_file(path: str) -> Path:
    """The file that `optimizer.options.weights` names.

    Raises:
        ValueError: there is none, or it is of another kind or too large for such a network.
    """
    given = Path(path).expanduser()
    file = given / NAME if given.is_dir() else given
    if not file.is_file():
        raise ValueError(f"must be a file that exists, or a folder with {NAME}")
    if file.suffix not in SUFFIXES:
        raise ValueError(f"must be a file {', '.join(SUFFIXES)}")
    if file.stat().st_size > LARGEST:
        raise ValueError(f"must be a file of at most {LARGEST // 2**20} MiB")
    return file


def check_header(file: Path) -> None:
    """Shapes in a safetensors file, read before the start. Shapes of other files are checked when ranks read them.

    Raises:
        ValueError: it is damaged, or of another network.
    """
    if file.suffix != ".safetensors":
        return
    content = file.read_bytes()
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])  # cut off, it is no JSON
        shapes = {name: _shape(each["shape"]) for name, each in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"must be a safetensors file, and the header of {file.name} cannot be read") from error
    network_of(shapes)


def _shape(given: object) -> tuple[int, ...]:
    """Of a tensor in a header.

    Raises:
        ValueError: it is no list of whole numbers from 0 on. JSON has other numbers, such as 39.7 and 1e999.
    """
    if not isinstance(given, list) or not all(type(size) is int and size >= 0 for size in given):
        raise ValueError("no shape")
    return tuple(given)

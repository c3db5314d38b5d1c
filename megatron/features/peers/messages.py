"""Signed messages of peers: a line of JSON with its signature, and for contributions tensors after it (safetensors).

A message is bound to its kind, run, round and peer, so that it cannot be used again as another one. Everything read is
hostile until it is checked: sizes before bytes are read, then the signature, then hash, names, types and shapes."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .signing import Signer

HEAD_LIMIT = 1 << 20  # bytes of the line of JSON
OVERHEAD = 512  # bytes of a tensor's entry in a payload, at most


Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of each tensor


class Refused(ValueError):
    """A message cannot be used. str() is the reason, for the ledger."""


def shown(value: object) -> str:
    """The beginning of a value of another peer, without control characters."""
    return ascii(value)[:80]


def seal(signer: Signer, facts: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """A message, signed by `facts["peer"]`."""
    body = {**facts, "sha256": digest(payload), "bytes": len(payload)}
    text = _canonical(body)
    signature = signer.sign(body["peer"], text)
    return b'{"signature":"' + signature.encode() + b'","signed":' + text + b"}\n" + payload


def unseal(signer: Signer, message: bytes, **bound: Any) -> tuple[dict[str, Any], bytes]:
    """Facts and payload of a message.

    Args:
        bound: facts that it must have, such as its kind, run, round and peer.

    Raises:
        Refused: it is not signed by the peer that it names, is damaged, or has other facts.
    """
    line = message[: HEAD_LIMIT + 1].partition(b"\n")[0]
    if len(line) > HEAD_LIMIT:
        raise Refused("damaged: no line of facts")
    payload = memoryview(message)[len(line) + 1 :]
    facts = checked(signer, line, **bound)
    if facts.get("bytes") != len(payload) or facts.get("sha256") != digest(payload):
        raise Refused("damaged: its hash differs")
    return facts, bytes(payload)


def checked(signer: Signer, line: bytes, **bound: Any) -> dict[str, Any]:
    """Facts of a message's line. Arguments and errors as of `unseal`."""
    try:
        head = json.loads(line, parse_constant=_no_number)
        signature, facts = head["signature"], head["signed"]
        peer, text = facts["peer"], _canonical(facts)
        good = isinstance(signature, str) and isinstance(peer, str) and signer.good(peer, text, signature)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(f"damaged: {type(error).__name__}") from error
    if not good:
        raise Refused("not signed by this peer")
    for name, value in bound.items():
        if facts.get(name) != value or type(facts.get(name)) is not type(value):
            raise Refused(f"another {name}: {shown(facts.get(name))}, and not {shown(value)}")
    found: dict[str, Any] = facts
    return found


def tensors_of(payload: bytes, expected: Expected) -> dict[str, Tensor]:
    """Tensors of a payload.

    Args:
        expected: shape and type of each tensor that it must have.

    Raises:
        Refused: it has other tensors, or values that are not finite.
    """
    from safetensors.torch import load

    try:
        found = load(payload)
    except Exception as error:  # an unexpected one must not keep the others from deciding the round
        raise Refused(f"damaged: {type(error).__name__}") from error
    check_tensors(found, expected)
    return found


def check_tensors(found: Mapping[str, Tensor], expected: Expected) -> None:
    """
    Raises:
        Refused: these are other tensors, or values that are not finite.
    """
    if {name: (tuple(each.shape), each.dtype) for name, each in found.items()} != dict(expected):
        raise Refused("tensors of other names, shapes or types")
    if not all(bool(each.isfinite().all()) for each in found.values() if each.is_floating_point()):
        raise Refused("values that are not finite")


def limit(expected: Expected) -> int:
    """Most bytes of a message with these tensors."""
    sizes = (torch.Size(shape).numel() * dtype.itemsize for shape, dtype in expected.values())
    return HEAD_LIMIT + sum(sizes) + OVERHEAD * (len(expected) + 1)


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)

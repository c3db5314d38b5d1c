"""Short forms that users may write, brought into the form of the schema."""

from __future__ import annotations

from typing import Any

from ..catalog import Path, lookup
from ..tree import drop, get, put
from .layers import ConfigSource


def normalise(source: ConfigSource) -> ConfigSource:
    """`source` with its short forms written out, in place: see the branches below. Returns it."""
    _empty_sections(source, source.values, ())
    if isinstance(source.values.get("precision"), str):
        _move(source, ("precision",), {"compute": source.values["precision"]}, ("precision", "compute"))
    _sources(source, ("data", "train"))
    for name in ("validation", "test"):
        path = ("data", name)
        value = get(source.values, path, None)
        if isinstance(value, (str, list)) or (
            isinstance(value, dict) and any(isinstance(value.get(each), str) for each in ("path", "stream"))
        ):
            _move(source, path, {name: value}, (*path, name))
        named = get(source.values, path, None)
        for member in named if isinstance(named, dict) else ():
            _sources(source, (*path, member))
    for index, phase in enumerate(_list(get(source.values, ("data", "phases"), None))):
        if isinstance(phase, dict):
            _sources(source, ("data", "phases", index, "sources"))
    _additions(source, ("hooks",))
    _additions(source, ("logging", "sinks"))
    _comms_logger(source)
    return source


def _comms_logger(source: ConfigSource) -> None:
    """Turn DeepSpeed's logger of communication, which waits for the device after every operation, into our account,
    which does not wait. A key of the account in the source has precedence."""
    path, account = ("deepspeed", "comms_logger"), ("logging", "communication")
    asked, logging = get(source.values, path, None), source.values.get("logging", {})
    if not isinstance(asked, dict) or not isinstance(logging, dict):
        return  # a rule reports that
    if asked.get("enabled") and logging.get("communication") is None:
        source.places[account] = source.origin(path)
        put(source.values, account, "counts")
    drop(source.values, path)


def _additions(source: ConfigSource, path: Path) -> None:
    """An import path, a list of them or one {type, options} as a list of {type, options}."""
    value = get(source.values, path, None)
    if isinstance(value, str) or (isinstance(value, dict) and "type" in value):
        _move(source, path, [value], (*path, 0))
    for index, item in enumerate(_list(get(source.values, path, None))):
        if isinstance(item, str):
            _move(source, (*path, index), {"type": item}, (*path, index, "type"))


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _sources(source: ConfigSource, path: Path) -> None:
    """A path, a list of paths or one {path, weight} as a list of {path, weight}."""
    value = get(source.values, path, None)
    if isinstance(value, str) or (isinstance(value, dict) and ("path" in value or "stream" in value)):
        _move(source, path, [value], (*path, 0))
        value = [value]
    for index, item in enumerate(_list(value)):
        if isinstance(item, str):
            _move(source, (*path, index), {"path": item}, (*path, index, "path"))


def _move(source: ConfigSource, path: Path, value: Any, inner: Path) -> None:
    """Put `value` at `path`. The places of `path` and below now also hold for `inner`."""
    origin, below = source.origin(path), source.places_at(path)
    put(source.values, path, value)
    for rest, place in below.items():
        source.places[(*inner, *rest)] = place
    source.places[inner] = source.places[path] = origin


def _empty_sections(source: ConfigSource, values: dict[str, Any], above: Path) -> None:
    """`evaluation:` with nothing below it is an empty section, not null."""
    for name, value in values.items():
        key = lookup((*above, name))
        if key and value is None and key.section:
            values[name] = {}
        elif key and isinstance(value, dict):
            _empty_sections(source, value, (*above, name))

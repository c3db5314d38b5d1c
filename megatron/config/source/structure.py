"""Unknown keys, wrong types and values out of range: the schema's own complaints in the user's words."""

import difflib
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from ..problems import ABSENT, Problem, shown_value
from ..schema import (
    Config,
    catalog_of,
    current_schema,
    describe_type,
    dotted,
    lookup,
    pattern_of,
    section_of,
    type_at,
    without_none,
)
from ..tree import Path, drop, get, put, thaw
from .layers import Origin

_STORE = (
    "make it a level: `checkpoint: {levels: [{place: store, url: URL, every: auto, keep: all}]}`, where every may be a "
    "number of steps and keep a number of copies"
)
FORMER: dict[Path, str] = {("checkpoint", name): _STORE for name in ("upload", "upload_every", "upload_keep_last")}


def set_apart(values: dict[str, Any]) -> dict[Path, Any]:
    """Remove the former keys from the values of a resolved file, in place. They had no effect on training.

    Returns:
        What they were.
    """
    absent = object()
    found = {path: value for path in FORMER if (value := get(values, path, absent)) is not absent}
    for path in found:
        drop(values, path)
    return found


HINTS = 30  # unknown keys for which near names are looked up: with more, it is another kind of file
NO_KEY: dict[Path, str] = {
    ("parallel", "data"): "it is ranks / (tensor * pipeline * context): give the ranks (launch.ranks or --ranks N)"
}
# Names that other programs have for keys, by their last part.
ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "min_learning_rate": "schedule.min_lr_ratio",
    "batch_size": "training.global_batch_size or training.micro_batch_size",
    "gradient_accumulation_steps": "training.accumulation",
    "max_steps": "training.steps",
    "train_iters": "training.steps",
    "seq_len": "training.sequence_length",
    "context_length": "training.sequence_length",
    "num_layers": "model.layers",
    "grad_clip": "optimizer.gradient_clipping",
    "max_grad_norm": "optimizer.gradient_clipping",
    "dp": "launch.ranks",
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
}
_STAND_INS = {"model.layers": "attention/mlp"}  # for a required key that is missing, so that the rest can be checked


def check_structure(
    values: dict[str, Any], origin: Callable[[Path], Origin]
) -> tuple[Config, list[Problem], frozenset[str]]:
    """Build the `Config` that `values` describe, as far as they can be read.

    Args:
        values: nested values as the user gave them, shorthands normalised.
        origin: where the value at a path came from.

    Returns:
        The configuration (values that are wrong replaced by defaults or stand-ins), the problems, and the keys
        whose value is not the user's because it was wrong or missing.
    """
    problems: list[Problem] = []
    broken: set[str] = set()
    values, hints = thaw(values), HINTS
    for _ in range(20):  # each round fixes all that it finds, and a fixed value may uncover another below it
        try:
            return current_schema().model_validate(values), problems, frozenset(broken)
        except ValidationError as error:
            paths = dict.fromkeys(_key_path(tuple(each["loc"])) for each in error.errors(include_url=False))
            for path in paths:
                hints -= type_at(path) is None
                problems.append(_problem(path, values, origin, hint=hints >= 0))
                broken.add(".".join(pattern_of(path)))
                broken.update(".".join(pattern_of(path[:n])) for n, part in enumerate(path) if isinstance(part, int))
            for path in reversed(list(paths)):
                _mend(path, values)
    raise RuntimeError(f"the configuration could not be repaired for checking: {problems}")


def _key_path(location: Path) -> Path:
    """pydantic's location without what it adds below a key (branches of a union, a mark for a mapping's names)."""
    location = location[:-1] if location[-1] == "[key]" else location
    known = next(length for length in range(len(location), -1, -1) if type_at(location[:length]) is not None)
    unknown_key = known < len(location) and section_of(type_at(location[:known])) is not None
    return location[: known + 1] if unknown_key else location[:known]


def _mend(path: Path, values: dict[str, Any]) -> None:
    key = lookup(path)
    drop(values, path)
    if key is None or not key.required:
        return
    if isinstance(path[-2] if len(path) > 1 else None, int):  # drop an item of a list that cannot be read
        drop(values, path[:-1])
    elif key.section:
        put(values, path, {})
    else:
        put(values, path, _STAND_INS.get(key.name, 1))


def _problem(path: Path, values: dict[str, Any], origin: Callable[[Path], Origin], hint: bool = True) -> Problem:
    """`hint`: suggest names that the user may have meant."""
    value, name, annotation = get(values, path), dotted(path), type_at(path)
    where = "" if value is ABSENT else str(origin(path))
    choices = _names(path[:-1])
    if choices and path[-1] not in choices:
        return Problem(
            name,
            f"the names in {dotted(path[:-1])} must be among {', '.join(choices)}",
            nearest(str(path[-1]), choices) or "use one of them",
            value,
            where,
        )
    if annotation is None:
        known = f"the keys there are: {', '.join(siblings(path))}"
        fix = (
            FORMER.get(path)
            or NO_KEY.get(path)
            or ((nearest_key(path) or known) if hint else "see the keys that are named above")
        )
        return Problem(name, f"unknown key in {dotted(path[:-1]) or 'the configuration'}", fix, value, where)
    key = lookup(path)
    limits = key.limits if key else {}
    words = describe_type(annotation, limits)
    if value is ABSENT and key is not None:
        unit = f" ({key.unit})" if key.unit else ""
        above = "" if len(path) < 2 else str(origin(path[:-1])) if isinstance(path[-2], int) else ""
        return Problem(name, f"{name} is required", f"give {words}{unit}: {key.sentence}", ABSENT, above)
    rule = f"{name} must be {words}" + (" or null" if key and key.nullable else "")
    return Problem(name, rule, type_fix(annotation, limits, value, path), value, where)


def _names(path: Path) -> tuple[str, ...]:
    """The names that the mapping at `path` may have, if the schema lists them."""
    bare = without_none(type_at(path))
    names = get_args(bare)[0] if get_origin(bare) is dict else None
    return get_args(names) if get_origin(names) is Literal else ()


def siblings(path: Path) -> list[str]:
    """The names that the schema has next to this path."""
    section = section_of(type_at(path[:-1]))
    return [] if section is None else list(section.model_fields)


def nearest(name: str, choices: Iterable[object]) -> str:
    """ "did you mean ...?" if one of the choices looks like `name`, else nothing."""
    found = difflib.get_close_matches(name.lower().replace("-", "_"), [str(each) for each in choices], n=1, cutoff=0.6)
    return f"did you mean {found[0]}?" if found else ""


def nearest_key(path: Path) -> str:
    """Advice about an unknown key: the same name in another section, or a similar one next to it or anywhere."""
    if "." in str(path[-1]):
        return f"nest it: `{str(path[-1]).replace('.', ': {')}: ...{'}' * str(path[-1]).count('.')}`"
    name = str(path[-1]).replace("-", "_")
    if name.lower() in ELSEWHERE:
        return f"did you mean {ELSEWHERE[name.lower()]}?"
    same = _by_name(current_schema()).get(name, [])
    same = [each for each in same if "*" not in each] or same  # rather a key than an entry of some list
    alike = difflib.get_close_matches(name.lower(), siblings(path), n=1, cutoff=0.8 if same else 0.6)
    ways = [dotted((*path[:-1], each)) for each in alike] + same[:3]
    if not ways:  # a key anywhere whose last part, or whose last two parts joined by '_', looks like it
        known = _by_name(current_schema())
        ways = [known[each][0] for each in difflib.get_close_matches(name, known, n=1, cutoff=0.75)]
    return f"did you mean {' or '.join(dict.fromkeys(ways))}?" if ways else ""


@cache
def _by_name(schema: type[Config]) -> dict[str, list[str]]:
    """The keys of a schema by their last part, and by their last two parts joined by '_'."""
    found: dict[str, list[str]] = {}
    for key in catalog_of(schema).values():
        for way in dict.fromkeys(("_".join(key.path[-2:]), key.path[-1])):
            found.setdefault(way, []).append(key.name)
    return found


def type_fix(annotation: Any, limits: dict[str, Any], value: Any, path: Path) -> str:
    """The fix for a value of the wrong type or out of range."""
    bare, key = without_none(annotation), lookup(path)
    if get_origin(bare) is Literal:
        return _from_choices(get_args(bare), value)
    if section_of(bare) or get_origin(bare) is dict:
        return f"indent its keys below {path[-1]}:"
    if get_origin(bare) is tuple:
        return f"write {len(get_args(bare))} numbers in brackets" + (
            f", as in {shown_value(key.default)}" if key else ""
        )
    if get_origin(bare) is list:
        return "write a list in brackets, or one item per line after '- '"
    if isinstance(value, str) and bare in (bool, int, float):
        return _from_text(bare, value)
    if bare is str and not isinstance(value, (dict, list)):
        return f'put it in quotes if text is meant: "{shown_value(value)}"'
    if bare in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _in_range(bare, limits, value)
    default = "" if key is None or key.required else f" (default: {shown_value(key.default)})"
    return f"give {describe_type(annotation, limits)}{default}"


def _from_choices(choices: tuple, value: Any) -> str:
    if value is False or value in ("no", "off", "null") and "none" in choices:  # `no` and `off` mean one of these
        for word in ("none", "off", "disabled"):
            if word in choices:
                return f"write {word}"
    return nearest(str(value), choices) or f"use one of: {', '.join(map(str, choices))}"


def _from_text(bare: type, value: str) -> str:
    word = value.strip().lower()
    if bare is bool:
        if word in ("yes", "on", "y", "true", "1"):
            return f"write true ({value!r} is text)"
        if word in ("no", "off", "n", "false", "0"):
            return f"write false ({value!r} is text)"
        return "write true or false"
    if ":" in word and word.replace(":", "").isdigit():
        return f"{value!r} is text, not a number in base 60: write the number itself"
    for text in (word, word.replace(",", ""), word.replace("_", "")):
        try:
            number = float(text)
        except ValueError:
            continue
        if math.isfinite(number):
            plain = int(number) if number.is_integer() and bare is int else text
            return f"write {plain} (without quotes, commas or underscores)"
    return f"write a number: {value!r} is text"


def _in_range(bare: type, limits: dict[str, Any], value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    inside = limits.get("ge", -math.inf) <= value <= limits.get("le", math.inf)
    if bare is int and isinstance(value, float) and inside:
        return f"write {int(value)}, without a point or exponent" if value.is_integer() else f"round it: {round(value)}"
    if value < limits.get("ge", value):
        return f"give at least {limits['ge']}"
    if value > limits.get("le", value):
        return f"give at most {limits['le']}"
    if "gt" in limits and value <= limits["gt"]:
        return f"give at least {limits['gt'] + 1}" if bare is int else f"give more than {limits['gt']}"
    return f"give less than {limits['lt']}" if "lt" in limits else f"give {describe_type(bare, limits)}"

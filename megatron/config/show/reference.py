"""The documentation and the editors' JSON schema, generated from the schema, and one key in full."""

import json
import textwrap
from dataclasses import dataclass
from typing import Any

from ..derive import AT_START
from ..problems import ABSENT, ConfigError, Problem, shown_value
from ..registry import KIND, registry_of
from ..resolution import Resolved
from ..schema import (
    Config,
    Key,
    Path,
    catalog,
    describe_type,
    dotted,
    lookup,
    parse_path,
    pattern_of,
    type_name,
    using_extensions,
)
from ..source.layers import Origin, Overridden
from ..source.structure import nearest, nearest_key
from ..tree import get, thaw


@dataclass(frozen=True)
class Explanation:
    """A key, and its value in a run if there is one."""

    name: str
    key: Key
    value: Any = ABSENT
    origin: Origin | None = None
    lost: tuple[Overridden, ...] = ()

    @property
    def type(self) -> str:
        return describe_type(self.key.annotation, self.key.limits) + (" or null" if self.key.nullable else "")

    def text(self) -> str:
        lines = [self.name if self.value is ABSENT else f"{self.name} = {shown_value(self.value)}"]
        if self.origin:
            lines.append(f"    from:    {self.origin}")
        lines += [f"    won:     over {shown_value(each.lost)} ({each.lost_origin})" for each in self.lost]
        lines += textwrap.wrap(self.key.sentence, 100, initial_indent="    meaning: ", subsequent_indent=" " * 13)
        lines.append(f"    type:    {self.type}" + (f", in {self.key.unit}" if self.key.unit else ""))
        if self.key.required:
            lines.append("    default: none, it is required")
        elif self.key.derived:
            lines.append(f"    default: {self.key.derived}")
        else:
            lines.append(f"    default: {default_text(self.key)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        known = self.value is not ABSENT
        return {
            "key": self.name,
            "value": self.value if known else None,
            "origin": str(self.origin) if self.origin else None,
            "source": self.origin.to_json() if self.origin else None,
            "meaning": self.key.sentence,
            "type": self.type,
            "unit": self.key.unit,
            "default": None if self.key.required else plain_default(self.key),
            "required": self.key.required,
            "derived": self.key.derived,
            "overridden": [each.to_json() for each in self.lost],
        }


def plain_default(key: Key) -> Any:
    """The default as plain lists and dictionaries, without what is default inside it."""
    if hasattr(key.default, "model_dump"):
        return thaw(key.default.model_dump(exclude_defaults=True))
    if isinstance(key.default, dict):
        return {
            name: thaw(each.model_dump(exclude_defaults=True)) if hasattr(each, "model_dump") else each
            for name, each in key.default.items()
        }
    return thaw(key.default)


def default_text(key: Key) -> str:
    """The default as YAML would say it."""
    return shown_value(plain_default(key))


def explain(name: str, resolved: Resolved | None) -> list[Explanation]:
    """A key, or every key of a section.

    Args:
        name: dotted key. Names and indices of the run's own, such as data.train.0.weight, are allowed.
        resolved: the run. None explains only the schema.

    Raises:
        ConfigError: the schema has no such key.
    """
    with using_extensions(tuple(resolved.config.model.extensions) if resolved else ()):
        return _explain(name, resolved)


def _explain(name: str, resolved: Resolved | None) -> list[Explanation]:
    path = parse_path(name)
    key = lookup(path)
    if key is None or key.section:
        above = pattern_of(path)
        inner = [each for each in catalog().values() if each.path[:-1] == above and not each.section]
        if not inner:
            beside = len(path) == 1 or lookup(path[:-1])
            fix = nearest_key(path) if beside else nearest(name, [each.name for each in catalog().values()])
            fix = fix or "name a section to see its keys. docs/configuration.md lists all"
            raise ConfigError([Problem(name, "the schema has no such key", fix)])
        return [_entry((*path, each.path[-1]), each, resolved) for each in inner]
    return [_entry(path, key, resolved)]


def _entry(path: Path, key: Key, resolved: Resolved | None) -> Explanation:
    name = dotted(path)
    if resolved is None:
        return Explanation(name, key)
    value = get(thaw(resolved.config.model_dump()), path)
    inside = [each for each in resolved.origins if each == name or each.startswith(name + ".")]
    origin = resolved.origins[inside[0]] if inside else None
    lost = tuple(each for each in resolved.overridden if each.key == name)
    return Explanation(name, key, value, origin, lost)


_HEAD = """\
# Configuration keys

[The 40 keys that people set](keys.md) are enough for most runs. This page says how files are read, and lists the pages
of all keys. `deepy config docs` generates it from the schema in `megatron/config/sections/`.

A run is one or more YAML files, merged left to right, and overrides:
`deepy train a.yml b.yml training.steps=500`.

- Mappings are merged key by key. Lists and all other values are replaced. `extends: base.yml` (or a list of files,
  relative to the folder of the file) puts other files before this one. Overrides come last, and their values are YAML.
- A default in *italics* is derived from other keys. `null` resets a key of an earlier file to its default. In
  `model.variants` it is a value: `full: {window: null}` has no window where `attention` has one.
- YAML is version 1.2: `1e-8` is a number, and only `true` and `false` are booleans. A repeated key, a number with a
  leading zero and `<<` are errors.
- Short forms: `precision: bf16` for `precision: {compute: bf16}`. `data.train` may be a path, a list of paths or a
  list of `{path, weight}`. `data.validation` and `data.test` may also map names to them.
- Files of GPT-NeoX are read without conversion. `deepy config convert old.yml` writes the native form.
- Paths of data, tokenizers and checkpoints are relative to the folder in which the run is started.
- `deepy config explain optimizer.lr a.yml` shows the source of a value, and `deepy config check --ranks 8 a.yml` the
  errors of a start.
- Editors that read `docs/config.schema.json` complete and check keys. For the YAML language server, the first line of a
  file is `# yaml-language-server: $schema=docs/config.schema.json` (relative to the file).

| page | sections |
|---|---|
"""
# Sections of each page. `kinds` has the sections of `model` for one kind of layer.
PAGES = {
    "model": ("Model", ("run", "model")),
    "kinds": ("Kinds of layers", ("kinds",)),
    "parallel": ("Layout and precision", ("parallel", "zero", "precision", "deepspeed")),
    "training": ("Training", ("optimizer", "schedule", "training", "objective", "adapter", "pruning")),
    "data": ("Data", ("data", "tokenizer")),
    "checkpoint": ("Checkpoints, evaluation and logs", ("checkpoint", "evaluation", "logging")),
    "launch": ("Launch and faults", ("launch", "watch", "spikes", "hooks")),
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("*", "\\*")


def _default(key: Key) -> str:
    if key.derived:
        when = " (at start)" if key.name in AT_START else ""
        return f"*{_cell(key.derived).replace('_', chr(92) + '_').replace('<', '&lt;')}*{when}"
    return "required" if key.required else f"`{default_text(key)}`"


def _row(key: Key) -> str:
    kind = type_name(key.annotation, key.limits) + (f" ({key.unit})" if key.unit else "")
    return f"| `{key.name}` | {_cell(kind)} | {_default(key)} | {_cell(key.sentence)} |"


def pages() -> dict[str, str]:
    """The pages of all keys by their path in docs/, and `configuration.md`, which lists them."""
    kinds = set(registry_of().names(KIND))
    by_section: dict[str, list[Key]] = {name: [] for name in ("kinds", *Config.model_fields)}
    for key in catalog().values():
        of_a_kind = key.path[0] == "model" and key.path[1:2] and key.path[1] in kinds
        by_section["kinds" if of_a_kind else key.path[0]].append(key)
    placed = {name for _, sections in PAGES.values() for name in sections}
    others = [name for name in by_section if name not in placed]
    found, rows = {}, []
    for page, (title, named) in PAGES.items():
        sections = [each for each in named if each in by_section] + (others if page == "launch" else [])
        found[f"configuration/{page}.md"] = "\n".join([
            f"# {title}\n",
            *(_section(each, by_section) for each in sections),
        ])
        rows.append(f"| [{title}](configuration/{page}.md) | {', '.join(f'`{name}`' for name in sections)} |")
    closing = "\nIn the names of keys, `*` stands for a name or a place in a list.\n"
    return {"configuration.md": _HEAD + "\n".join(rows) + "\n" + closing, **found}


def _section(name: str, by_section: dict[str, list[Key]]) -> str:
    about = "Options of each kind of layer." if name == "kinds" else Config.model_fields[name].description
    rows = [_row(key) for key in by_section[name] if not key.section]
    table = ["| key | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([f"## {name}\n", f"{about}\n", *table, *([""] if rows else [])])


def editor_schema() -> str:
    """docs/config.schema.json: what editors complete and check.

    Short forms and `extends` are allowed. No section is required, since a file may be one of several."""
    schema = Config.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        if section is schema or section["title"] in ("ModelSection", "TrainingSection"):
            section.pop("required", None)
        for entry in section.get("properties", {}).values():
            entry.pop("title", None)
    properties = schema["properties"]
    files = _either({"type": "string"}, _list({"type": "string"}))
    properties["extends"] = {**files, "description": "Files that come before this one."}
    precision = _either({"enum": ["fp32", "bf16", "fp16"]}, {"$ref": "#/$defs/PrecisionSection"})
    properties["precision"] = {**precision, "description": "Number formats."}
    _data_short_forms(schema["$defs"]["DataSection"]["properties"])
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Configuration of a run"}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _either(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _data_short_forms(data: dict[str, Any]) -> None:
    one = _either({"type": "string"}, {"$ref": "#/$defs/SourceSection"})
    sources = _either({"type": "string"}, {"$ref": "#/$defs/SourceSection"}, _list(one))
    data["train"] = {**sources, "description": data["train"]["description"]}
    for name in ("validation", "test"):
        named = {"type": "object", "additionalProperties": sources}
        data[name] = {**_either({"type": "string"}, _list(one), named), "description": data[name]["description"]}

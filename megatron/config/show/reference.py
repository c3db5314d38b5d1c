"""The documentation and the editors' JSON schema, generated from the schema."""

from __future__ import annotations

import json
from typing import Any

from ..catalog import Key, catalog, type_name
from ..derive import AT_START
from ..registry import KIND, registry_of
from ..schema import Config
from .explain import default_text

_HEAD = """\
# Configuration keys

[The 40 keys that people set](keys.md) are enough for most runs. This page says how files are read, and lists the pages
of all keys. `python tools/config.py docs` generates it from the schema in `megatron/config/sections/`.

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
    "training": ("Training", ("optimizer", "schedule", "training", "objective", "adapter")),
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
    layout = {
        **PAGES,
        "launch": (PAGES["launch"][0], (*PAGES["launch"][1], *(name for name in by_section if name not in placed))),
    }
    found, rows = {}, []
    for page, (title, sections) in layout.items():
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

    Short forms and `extends` are allowed. No section is required, since a file may be one of several.
    """
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

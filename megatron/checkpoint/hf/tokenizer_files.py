"""Tokenizers of exported folders: for all versions of transformers, and compared with the run's on real texts."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer

from megatron.config.file_access import read_json
from megatron.config.sections.data import TokenizerSection
from megatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer

# Model types for which version 5 replaces the class in tokenizer_config.json by one with other rules, unless the
# file also names code (`auto_map`), which it runs only with trust_remote_code=True.
REPLACED = ("qwen2",)
CODE = '''"""tokenizer.json as it is: transformers 5 has other rules of its own for this type of model."""

from transformers import PreTrainedTokenizerFast


class PlainTokenizer(PreTrainedTokenizerFast):
    pass
'''
# Texts on which tokenizers are compared, in addition to this package's own: other scripts and signs.
COUNT = 1000
_SPECIAL = (
    "Der Fluß über die Brücke, naïve façade: señor, İstanbul, Ångström, œuvre.",
    "A\u0308 o\u0308 e\u0301 n\u0303: letters and marks in two characters each.",
    "中文和日本語の文章、「かな」もカタカナも。한국어 문장입니다.",
    "Привет, мир! Ёлка, ъезд. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم",
    "हिन्दी में एक वाक्य। ภาษาไทยไม่มีช่องว่าง Tiếng Việt có dấu.",
    "🙂👩‍👩‍👧‍👦 🇳🇴 ½ ① ﬁ ﬀ Ⅳ № ™ … — – ‘’ “”",
    "1234567890 3.14159 1,000,000 0xFF 1e-05 2026-11-24T16:30:00Z 192.168.0.1",
    "  leading, trailing  \n\n\n\ttabs\t\tand   runs    of     spaces      \r\nlines\rof all\r\nkinds\n ",
    "don't we'll I'M THEY'RE it's 'quoted' rock'n'roll",
    "def f(x):\n    return {k: v[::-1] for k, v in x.items() if v != ''}  # !@#$%^&*()_+-=[]{}|;:\\\"<>/?`~\n",
    "<b>mark</b> &amp; [link](https://example.org/a?b=c&d=%20) $x^2 + \\frac{1}{2}$",
    "\u00a0no-break\u2003em\u200bzero\ufeffmark\u3000wide",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "",
    " ",
    "\n",
)
_TOKENS = ("bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_AS_THEY_ARE = ("chat_template", "padding_side", "truncation_side", "model_input_names")


def write_tokenizer(
    folder: Path, section: TokenizerSection, model_type: str, length: int
) -> tuple[dict[str, int | None], list[str]]:
    """Write a run's own tokenizer, with the chat template and the special tokens of its folder.

    Args:
        model_type: of the exported model.
        length: tokens of the longest sequence.

    Returns:
        The special ids for config.json, and notes.
    """
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": section.eod_id, "pad_token_id": None}
    if section.type == "none":
        return ids, ["the run has no tokenizer, so none was written"]
    local = Path(section.path) if section.path else None
    file = local / "tokenizer.json" if local is not None and local.is_dir() else local
    if section.type not in ("huggingface", "gpt2") or file is None or not file.is_file():
        name = " ".join(filter(None, (section.type, section.path)))
        return ids, [
            f"the tokenizer ({name}) is no local tokenizer.json and was not written: "
            "add its files to the model's folder"
        ]
    tokenizer = build_tokenizer(section)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    known = {}
    if section.type == "gpt2":
        tokenizer.backend.save(str(folder / "tokenizer.json"))
    else:
        shutil.copyfile(file, folder / "tokenizer.json")
        known = _beside(file, folder)
    tokens, notes = _special(known, tokenizer)
    if (longest := known.get("model_max_length", length)) != length:
        notes.append(f"model_max_length is {length}, the run's length. The tokenizer's folder says {longest!r:.40}")
    settings = {
        **{name: known[name] for name in _AS_THEY_ARE if name in known},
        **tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        **_prefix(tokenizer),
    }
    if model_type in REPLACED:
        settings["auto_map"] = {"AutoTokenizer": [None, "plain_tokenizer.PlainTokenizer"]}
        (folder / "plain_tokenizer.py").write_text(CODE, encoding="utf-8")
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    ids["eos_token_id"] = tokenizer.eod_id
    for name in ("bos_token", "pad_token"):
        ids[f"{name}_id"] = tokenizer.backend.token_to_id(tokens[name]) if name in tokens else None
    return ids, notes


def shorter(folder: Path, length: int) -> list[str]:
    """A note if a copied tokenizer_config.json says that the run's sequences are too long."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else None
    longest = settings.get("model_max_length") if isinstance(settings, dict) else None
    if not isinstance(longest, int | float) or longest >= length:
        return []
    return [f"model_max_length of the tokenizer is {longest}, as imported. The run's sequences have {length} tokens"]


def _beside(file: Path, folder: Path) -> dict[str, Any]:
    """The settings in the folder of a tokenizer.json. A chat template in a file is copied."""
    config, template = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
    if file.name != "tokenizer.json" or not config.is_file():
        return {}
    if template.is_file():
        shutil.copyfile(template, folder / template.name)
    found = read_json(config)
    return found if isinstance(found, dict) else {}


def _special(known: dict[str, Any], tokenizer: HuggingFaceTokenizer) -> tuple[dict[str, Any], list[str]]:
    """Special tokens by their text. One that tokenizer.json lacks would get an id that the model has no row for."""
    texts = {name: token for name in _TOKENS if (token := _text(known.get(name))) is not None}
    more = known.get("additional_special_tokens") or known.get("extra_special_tokens") or []
    extra = [token for each in more if (token := _text(each)) is not None] if isinstance(more, list) else []
    lost = sorted({token for token in (*texts.values(), *extra) if tokenizer.backend.token_to_id(token) is None})
    found: dict[str, Any] = {name: token for name, token in texts.items() if token not in lost}
    if kept := [token for token in extra if token not in lost]:
        found["additional_special_tokens"] = kept
    if tokenizer.eod_id is not None:
        found["eos_token"] = tokenizer.backend.id_to_token(tokenizer.eod_id)
    return found, [f"the special token {token!r} was not written: tokenizer.json has no id for it" for token in lost]


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _prefix(tokenizer: HuggingFaceTokenizer) -> dict[str, bool]:
    """The space before a text. Version 4 reads it from tokenizer_config.json only."""
    before = json.loads(tokenizer.backend.to_str())["pre_tokenizer"] or {}
    return {"add_prefix_space": before["add_prefix_space"]} if "add_prefix_space" in before else {}


def differing(folder: Path, tokenizer: Tokenizer) -> str:
    """Difference of ids on real texts between transformers' tokenizer and the run's, "" without one."""
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each class fails in its own way
        return f"transformers cannot open its tokenizer: {error!r:.500}"
    texts = list(real_texts())
    found = theirs(texts, add_special_tokens=False, verbose=False)["input_ids"]
    wanted = tokenizer.encode_batch(texts)
    other = sum(mine != its for mine, its in zip(wanted, found, strict=True))
    kind = f"{type(theirs).__name__} of transformers {transformers.__version__}"
    told = f"{kind} makes other ids of {other} of {len(texts)} texts than tokenizer.json, which the run reads"
    return told if other else ""


@cache
def real_texts() -> tuple[str, ...]:
    """The same texts on every machine with the same version of this package."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(root.rglob("*.py"))
    paragraphs = [each for file in files for each in file.read_text(encoding="utf-8").split("\n\n") if each]
    wanted = COUNT - len(_SPECIAL)
    return (*_SPECIAL, *(paragraphs[number * len(paragraphs) // wanted] for number in range(wanted)))

"""An imported model's settings and tokenizer files, which every checkpoint of its runs keeps and an export writes back.

The contents of config.json and generation_config.json are kept. The tokenizer's files stay in the imported folder.
Their names and checksums are kept.

Version 5 of transformers has all rotary options in `rope_parameters`, writes infinite numbers as mappings, and has
other names for the layers of hybrids. Version 4 silently takes defaults for them."""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

from megatron.config.file_access import LARGEST, UnsafeName, path_inside, read_json
from megatron.config.sections.data import TokenizerSection
from megatron.config.sections.model import ModelSection
from megatron.data.errors import DataError
from megatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer, token_text

from ..format.errors import CheckpointError, understanding
from ..format.manifest import IMPORTED
from .architecture import MOST, Architecture

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
OLD, NEW = "4.57", "5.23"  # the tests open exports with both
_LEGACY_LAYERS = {"linear_attention": "mamba"}  # of `layers_block_type`


def least_version(architecture: Architecture, model: ModelSection) -> tuple[str, str]:
    """The least version of transformers that gives the model's logits, and why ("" if 4.57 does)."""
    reason = architecture.newer(model)
    return NEW if reason else OLD, reason


def for_both(settings: dict[str, Any], architecture: Architecture | None = None) -> dict[str, Any]:
    """The content of a config.json of version 5, with version 4's settings, general ones and the architecture's.

    Raises:
        ValueError: an infinite number that cannot be replaced.
    """
    found = {name: finite(value) for name, value in settings.items()}
    rope = found.get("rope_parameters") or {}
    if "full_attention" in rope:  # of each type of layers
        found |= _rope(rope["full_attention"])
    if rope.get("rope_theta") is not None:
        found |= _rope(rope)
    if architecture is not None:
        found |= architecture.older(found)
    if "layers_block_type" in found:
        found["layers_block_type"] = [_LEGACY_LAYERS.get(each, each) for each in found["layers_block_type"]]
    return found


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("rope_type") == "proportional":
        return {}  # version 4 has no name for it
    own = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in parameters.items() if name not in own and value is not None}
    found = {"rope_theta": parameters["rope_theta"]}
    found["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if "partial_rotary_factor" in parameters:
        found["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return found


def finite(value: Any) -> Any:
    """Replace version 5's mappings of infinite numbers.

    Raises:
        ValueError: an infinite number that cannot be replaced.
    """
    if isinstance(value, dict) and "__float__" in value:
        number = float(value["__float__"])
        if number != math.inf:
            raise ValueError(f"{number} cannot be written so that all versions of transformers read it")
        return MOST
    if isinstance(value, list):
        return [finite(each) for each in value]
    return {name: finite(each) for name, each in value.items()} if isinstance(value, dict) else value


def make_readable(folder: Path, architecture: Architecture) -> None:
    """Rewrite the config.json of a folder that version 5 has saved."""
    path = folder / "config.json"
    settings = for_both(json.loads(path.read_text(encoding="utf-8")), architecture)
    settings = dict.fromkeys(IDS) | settings  # an absent one means the class's default, of another vocabulary
    if settings["eos_token_id"] is None:  # some classes take null for absent
        read = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
        settings["eos_token_id"] = None if read.eos_token_id is None else []
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja", re.ASCII)
# Settings that name code or files of another folder, or that the writing program sets.
_NOT_KEPT = ("auto_map", "transformers_weights", "_name_or_path", "transformers_version")
LARGEST_SETTINGS = 2**20  # bytes of config.json: every rank of every run from it reads them


def file_in(folder: Path, name: str) -> Path:
    """A file of a Hugging Face folder. In the hub's cache it is a link to one in `blobs`.

    Raises:
        CheckpointError: the name or a link leads out of the folder or the model's cache.
    """
    snapshots = folder.resolve().parent
    cached = snapshots.name == "snapshots" and (snapshots.parent / "blobs").is_dir()
    try:
        return path_inside(folder, name, root=snapshots.parent if cached else None)
    except UnsafeName as error:
        raise CheckpointError(folder, str(error)) from error


@dataclass(frozen=True)
class Companions:
    """Content of an imported folder except for its weights."""

    folder: str
    config: dict[str, Any]  # config, generation: the contents of config.json and, if any, of generation_config.json
    generation: dict[str, Any] | None
    files: dict[str, str]  # the tokenizer's files -> SHA-256
    tokenizer: str | None  # a run's hash of tokenizer.json, or None
    dtype: str  # of most of its weights

    @classmethod
    def read(cls, folder: Path, section: TokenizerSection, dtype: str) -> "Companions":
        """Read a folder.

        Raises:
            CheckpointError: a file is damaged, too large, or a link that leads elsewhere.
        """
        generation = _settings(folder, GENERATION) if os.path.lexists(folder / GENERATION) else None
        names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
        names += [f"{each.parent.name}/{each.name}" for each in sorted(folder.glob("additional_chat_templates/*"))]
        files = {name: _checksum(file_in(folder, name)) for name in names if _is_tokenizer_file(name)}
        known = build_tokenizer(section).hash if section.type != "none" else None
        return cls(str(folder.absolute()), _settings(folder, "config.json"), generation, files, known, dtype)

    @classmethod
    def of(cls, extra: Mapping[str, Any], subject: object) -> "Companions | None":
        """From a checkpoint's meta data. None if its run started from no imported model."""
        if IMPORTED not in extra:
            return None
        with understanding(subject):
            found = cls(**extra[IMPORTED])
            if not (isinstance(found.config["model_type"], str) and isinstance(found.files, dict)):
                raise ValueError(f"{IMPORTED} has another form")
        return found

    def extra(self) -> dict[str, Any]:
        """The entry in a checkpoint's meta data."""
        return {IMPORTED: asdict(self)}

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    def same_tokenizer(self, section: TokenizerSection) -> bool:
        """Whether a run reads the imported model's tokenizer, or none."""
        if section.type == "none":
            return True
        try:
            return build_tokenizer(section).hash == self.tokenizer
        except DataError:
            return False

    def settings(self, more: Mapping[str, Any] = MappingProxyType({}), *, ids: bool = True) -> PreTrainedConfig:
        """Its configuration.

        Args:
            more: settings that replace its own, except for special ids.
            ids: keep the special ids. Otherwise each is None.

        Raises:
            ValueError, TypeError, StrictDataclassError: the installed transformers rejects it.
        """
        values = {name: finite(value) for name, value in self.config.items() if name not in _NOT_KEPT}
        values |= {name: value for name, value in more.items() if name not in IDS}
        return CONFIG_MAPPING[self.model_type].from_dict(values if ids else values | dict.fromkeys(IDS))

    def copy_tokenizer(self, out: Path) -> list[str]:
        """Copy the tokenizer's files, byte for byte.

        Returns:
            Names of files that have changed or are gone. If there are any, no file is copied.

        Raises:
            CheckpointError: a name is no tokenizer file's.
        """
        contents = {}
        for name, checksum in self.files.items():
            if not _is_tokenizer_file(name):
                raise CheckpointError(self.folder, f"{name!r:.200} is no file of a tokenizer")
            try:
                content = _content(file_in(Path(self.folder), name))
            except (CheckpointError, OSError):
                continue
            if hashlib.sha256(content).hexdigest() == checksum:
                contents[name] = content
        lost = [name for name in self.files if name not in contents]
        for name, content in () if lost else contents.items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(content)
        return lost

    def changed(self, theirs: PreTrainedConfig) -> list[str]:
        """A sentence for each setting that differs in an exported configuration, and for each dropped one."""
        before, after = self.settings().to_dict(), theirs.to_dict()
        names = sorted(name for name in before if name not in _NOT_KEPT and before[name] != after.get(name))
        dropped = [name for name in _NOT_KEPT[:2] if self.config.get(name)]
        return [
            *(f"{name} is {after.get(name)!r:.80}, and the imported model has {before[name]!r:.80}" for name in names),
            *(
                f"{name} of the imported config.json was not written: it names files that do not come along"
                for name in dropped
            ),
        ]


def not_kept(folder: Path) -> list[str]:
    """Names in an imported folder that no export will have. The model card is written again."""
    known = {"config.json", GENERATION, "README.md", *TOKENIZER_FILES}
    used = (".safetensors", ".safetensors.index.json", "additional_chat_templates/")
    names = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
    return [name for name in names if name not in known and not name.endswith(used) and not name.startswith(".")]


def _is_tokenizer_file(name: object) -> bool:
    return isinstance(name, str) and (name in TOKENIZER_FILES or _TEMPLATE.fullmatch(name) is not None)


def _settings(folder: Path, name: str) -> dict[str, Any]:
    file = file_in(folder, name)
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(file, f"it cannot be read ({error}): fetch it again") from error
    if not isinstance(found, dict) or file.stat().st_size > LARGEST_SETTINGS:
        raise CheckpointError(file, f"it must be a JSON object of at most {LARGEST_SETTINGS >> 20} MiB")
    return found


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise CheckpointError(file, f"it is too large: it must have at most {LARGEST >> 20} MiB")
    return content


def _checksum(file: Path) -> str:
    return hashlib.sha256(_content(file)).hexdigest()


# Model types for which version 5 replaces the class in tokenizer_config.json by one with other rules, unless the
# file also names code (`auto_map`), which it runs only with trust_remote_code=True.
REPLACED = ("qwen2", "qwen3_5_text", "qwen3_5_moe_text")
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
    texts = {name: token for name in _TOKENS if (token := token_text(known.get(name))) is not None}
    more = known.get("additional_special_tokens") or known.get("extra_special_tokens") or []
    extra = [token for each in more if (token := token_text(each)) is not None] if isinstance(more, list) else []
    lost = sorted({token for token in (*texts.values(), *extra) if tokenizer.backend.token_to_id(token) is None})
    found: dict[str, Any] = {name: token for name, token in texts.items() if token not in lost}
    if kept := [token for token in extra if token not in lost]:
        found["additional_special_tokens"] = kept
    if tokenizer.eod_id is not None:
        found["eos_token"] = tokenizer.backend.id_to_token(tokenizer.eod_id)
    return found, [f"the special token {token!r} was not written: tokenizer.json has no id for it" for token in lost]


def _prefix(tokenizer: HuggingFaceTokenizer) -> dict[str, bool]:
    """The space before a text. Version 4 reads it from tokenizer_config.json only."""
    before = json.loads(tokenizer.backend.to_str())["pre_tokenizer"] or {}
    return {"add_prefix_space": before["add_prefix_space"]} if "add_prefix_space" in before else {}


_IDS: dict[bytes, list[list[int]]] = {}


def _ids(rules: tuple[str | None, ...], encode: Callable[[list[str]], list[list[int]]]) -> list[list[int]]:
    """Ids of the real texts. A process that exports several models with one tokenizer encodes them once."""
    key = hashlib.sha256(repr(rules).encode()).digest()
    if key not in _IDS:
        _IDS[key] = encode(list(real_texts()))
    return _IDS[key]


def differing(folder: Path, tokenizer: Tokenizer) -> str:
    """Difference of ids on real texts between transformers' tokenizer and the run's, "" without one."""
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each class fails in its own way
        return f"transformers cannot open its tokenizer: {error!r:.500}"

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = theirs(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    rules = getattr(theirs, "backend_tokenizer", None)
    if rules is None:  # a class with a vocabulary in files of its own
        found = encode(list(real_texts()))
    else:
        settings = repr(theirs.init_kwargs).replace(str(folder), "")
        found = _ids((type(theirs).__name__, rules.to_str(), settings), encode)
    wanted = _ids((type(tokenizer).__name__, tokenizer.hash), tokenizer.encode_batch)
    other = sum(mine != its for mine, its in zip(wanted, found, strict=True))
    kind = f"{type(theirs).__name__} of transformers {transformers.__version__}"
    difference = f"{kind} makes other ids of {other} of {len(found)} texts than tokenizer.json, which the run reads"
    return difference if other else ""


@cache
def real_texts() -> tuple[str, ...]:
    """The same texts on every machine with the same version of this package."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(root.rglob("*.py"))
    paragraphs = [each for file in files for each in file.read_text(encoding="utf-8").split("\n\n") if each]
    wanted = COUNT - len(_SPECIAL)
    return (*_SPECIAL, *(paragraphs[number * len(paragraphs) // wanted] for number in range(wanted)))

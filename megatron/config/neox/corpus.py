"""GPT-NeoX's keys of data and tokenizers."""

from typing import Any

from .post_training import OBJECTIVES, trained
from .reader import Flat, Native, as_number

# Key -> GPT-NeoX's default.
KEYS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "data_path train_data_paths valid_data_paths test_data_paths train_label_data_paths "
            "valid_label_data_paths test_label_data_paths train_data_weights valid_data_weights test_data_weights "
            "vocab_file merge_file"
        ).split()
    ),
    "split": "969, 30, 1",
    "weight_by_num_documents": False,
    "weighted_sampler_alpha": 1.0,
    "pack_impl": "packed",
    "allow_chopped": True,
    "num_workers": 2,
    "tokenizer_type": "GPT2BPETokenizer",
}

# Share by which GPT-NeoX asks each blended source for more samples than it needs.
BLEND_MARGIN = 1.005

EOD = "<|endoftext|>"
# tokenizer_type -> (native type, end-of-document token where GPT-NeoX fixes one)
TOKENIZERS = {
    "gpt2bpetokenizer": ("gpt2", EOD),
    "hftokenizer": ("huggingface", EOD),
    "hfgpt2tokenizer": ("huggingface", EOD),
    "spmtokenizer": ("sentencepiece", None),
    "charleveltokenizer": ("characters", None),
    "tiktokentokenizer": ("tiktoken", None),
}


def translate(flat: Flat, native: Native) -> None:
    """Translate the data and tokenizer keys."""
    native.put("data.workers", flat.integer("num_workers"), "num_workers")
    if trained(flat) in OBJECTIVES:
        native.unused("its files have one document in a sample", "pack_impl", "allow_chopped")
        native.unused("only data_path is split", "split")
        _tokenizer(flat, native)
        return
    native.put("data.order", "pythia", "data_path", "train_data_paths")
    native.put("data.reset_attention_at_eod", False, "data_path", "train_data_paths")
    separate = [name for name in ("train_data_paths", "valid_data_paths", "test_data_paths") if flat.given(name)]
    if flat.given("data_path"):
        if separate:
            flat.problem("data_path", f"GPT-NeoX takes data_path or {separate[0]}, not both", "remove one of them")
        _one_file(flat, native)
    elif separate:
        _separate_files(flat, native)
    for name in ("train", "valid", "test"):
        for part in (f"{name}_data_weights", f"{name}_label_data_paths"):
            if flat.raw(part) and not flat.given(f"{name}_data_paths"):
                flat.problem(part, f"{part} needs {name}_data_paths", "remove it or give the paths")
    if not flat.given("data_path"):
        native.unused("only data_path is split", "split")
    _weighting(flat, native)
    _packing(flat, native)
    _tokenizer(flat, native)


def _packing(flat: Flat, native: Native) -> None:
    kind = flat.choice(
        "pack_impl", {"packed": "continuous", "pack_until_overflow": "until_overflow", "unpacked": "unpacked"}
    )
    chopped = flat.boolean("allow_chopped")
    if kind in (None, "continuous"):
        native.unused("at a value that changes nothing", "pack_impl")
        native.unused("GPT-NeoX reads it only where pack_impl is not packed", "allow_chopped")
        return
    native.put("data.packing", kind, "pack_impl")
    native.put("data.drop_long", not chopped, "allow_chopped")
    if kind == "unpacked":
        native.put("data.order", "stream", "pack_impl")
        native.note(
            "data.packing: unpacked: a sample has one document. GPT-NeoX appends the first token of the next document, "
            "with its label, and its order is another one"
        )
        return
    if flat.given("data_path"):
        native.note(
            "data.packing: until_overflow: with data_path, GPT-NeoX fills validation and test samples from the first "
            "documents of the file, which are training documents. Here they come from their own part of the split"
        )


def _weighting(flat: Flat, native: Native) -> None:
    alpha = flat.defaulted_number("weighted_sampler_alpha")
    if not flat.boolean("weight_by_num_documents") or flat.given("data_path"):
        native.unused("weights are those given", "weight_by_num_documents")
        native.unused("only weight_by_num_documents with several files reads it", "weighted_sampler_alpha")
        return
    if alpha < 0:
        flat.problem("weighted_sampler_alpha", "weighted_sampler_alpha must be at least 0", "use 0.3, or 1")
        return
    native.put("data.weighting", "neox-documents", "weight_by_num_documents")
    native.put("data.alpha", alpha, "weighted_sampler_alpha")
    native.note(
        "data.weighting: neox-documents, GPT-NeoX's weights by number of documents: they replace those given, and are "
        "less than proportional (100, 300 and 600 documents give 0.167, 0.389 and 0.444 with alpha 1). "
        "With data.weighting=documents they are proportional to documents ** alpha"
    )


def _one_file(flat: Flat, native: Native) -> None:
    native.put("data.train", [{"path": flat.text("data_path"), "weight": 1.0}], "data_path")
    native.put("data.margin", 1.0, "data_path")
    text = str(flat.raw("split"))
    given = [as_number(part) for part in text.split("," if "," in text else "/")]
    parts = [float(part) for part in given if part is not None]
    if len(parts) < len(given) or any(part < 0 for part in parts) or not sum(parts[:3]):
        flat.problem("split", "split must be up to three shares that are not all 0", "write it as in '969, 30, 1'")
        return
    native.put("data.split", (parts + [0.0, 0.0])[:3], "split")


def _separate_files(flat: Flat, native: Native) -> None:
    native.put("data.margin", BLEND_MARGIN, "train_data_paths")
    for name, key in (("train", "data.train"), ("valid", "data.validation"), ("test", "data.test")):
        paths = f"{name}_data_paths"
        if not flat.given(paths):
            flat.problem(paths, "train_data_paths, valid_data_paths and test_data_paths go together", f"add {paths}")
            continue
        sources = _sources(flat, name)
        value = sources if name == "train" else {"validation" if name == "valid" else name: sources}
        native.put(key, value, paths, f"{name}_data_weights", f"{name}_label_data_paths")


def _sources(flat: Flat, name: str) -> list[dict[str, Any]]:
    paths = flat.items(f"{name}_data_paths") or []
    weights = flat.items(f"{name}_data_weights")
    if not paths or not all(isinstance(path, str) for path in paths):
        flat.problem(f"{name}_data_paths", "it must be a list of prefixes of .bin/.idx pairs", 'write ["path/prefix"]')
        return []
    if weights is None:
        weights = [1.0] * len(paths)
    numbers = [float(number) for weight in weights if (number := as_number(weight)) is not None]
    if not len(numbers) == len(weights) == len(paths) or any(number <= 0 for number in numbers):
        flat.problem(
            f"{name}_data_weights",
            f"it must have one number above 0 for each of the {len(paths)} paths",
            "write one weight per path, and omit sources without weight",
        )
        return []
    sources = [{"path": path, "weight": weight} for path, weight in zip(paths, numbers)]
    labels = flat.items(f"{name}_label_data_paths")
    if not labels:
        return sources
    if len(labels) != len(paths) or not all(isinstance(path, str) for path in labels):
        flat.problem(f"{name}_label_data_paths", f"must have {len(paths)} prefixes", "write one label file per path")
        return sources
    return [source | {"labels": path} for source, path in zip(sources, labels)]


def _tokenizer(flat: Flat, native: Native) -> None:
    named = str(flat.raw("tokenizer_type")).lower()
    kind, eod = flat.choice("tokenizer_type", TOKENIZERS) or TOKENIZERS["hftokenizer"]
    native.put("tokenizer.type", kind, "tokenizer_type")
    if eod:
        native.put("tokenizer.eod_token", eod, "tokenizer_type")
    if flat.given("vocab_file"):
        native.put("tokenizer.path", flat.text("vocab_file"), "vocab_file")
    elif named == "hfgpt2tokenizer":
        native.put("tokenizer.path", "gpt2", "vocab_file")
    if kind == "gpt2" and flat.given("merge_file"):
        native.put("tokenizer.merges", flat.text("merge_file"), "merge_file")
    else:
        native.unused("only GPT2BPETokenizer reads it", "merge_file")

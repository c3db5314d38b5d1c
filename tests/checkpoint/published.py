"""Folders as model makers publish them: tokenizers of every form in use, chat templates, several end tokens."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron.checkpoint.hf.companions import real_texts
from tests.model.parity import randomise

ROWS = 640  # of the embedding. Tokenizers have fewer
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>", "<|pad|>", "<|endoftext|>"]  # the last: classes of theirs add it
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|turn|>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = _QWEN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
_LLAMA3 = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    first = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def tokenizer_json(form: str) -> str:
    """The text of a tokenizer.json, trained on real texts. `form`: one of FORMS, or qwen3_5."""
    backend = Tokenizer(models.BPE(byte_fallback=form == "llama2", unk_token="<unk>" if form == "llama2" else None))
    special = ["<unk>", *SPECIAL] if form == "llama2" else list(SPECIAL)
    if form == "llama2":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    elif form in ("neox", "gpt2", "prefix"):
        backend.normalizer = normalizers.NFC() if form == "neox" else None
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=form == "prefix")
    else:
        backend.normalizer = None if form == "llama3" else normalizers.NFC()
        backend.pre_tokenizer = _split({"qwen": _QWEN, "qwen3_5": _QWEN35, "llama3": _LLAMA3}[form])
    if form != "llama2":
        backend.decoder = decoders.ByteLevel()
    alphabet = [] if form == "llama2" else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False, limit_alphabet=300
    )
    backend.train_from_iterator(real_texts()[::4], trainer)
    if form in ("llama2", "llama3"):
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
        )
    content = json.loads(backend.to_str())
    if form == "llama2":  # bytes are plain entries of the vocabulary there
        content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
    return json.dumps(content, ensure_ascii=False)


FORMS = ("neox", "gpt2", "prefix", "qwen", "llama3", "llama2")
# The form of tokenizer that models of a type have, and the class that their files name.
USUAL = {
    "gpt_neox": ("neox", "GPTNeoXTokenizerFast"),
    "gpt2": ("gpt2", "GPT2TokenizerFast"),
    "qwen2": ("qwen", "Qwen2Tokenizer"),
    "qwen3": ("qwen", "Qwen2Tokenizer"),
    "qwen3_next": ("qwen", "Qwen2Tokenizer"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5Tokenizer"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen3_5Tokenizer"),
    "qwen2_moe": ("qwen", "Qwen2Tokenizer"),
    "qwen3_moe": ("qwen", "Qwen2Tokenizer"),
    "mistral": ("llama2", "LlamaTokenizerFast"),
    "mixtral": ("llama2", "LlamaTokenizerFast"),
    "gemma2": ("llama2", "PreTrainedTokenizerFast"),
    "mamba": ("neox", "GPTNeoXTokenizerFast"),
    "mamba2": ("neox", "GPTNeoXTokenizerFast"),
    "rwkv": ("neox", "GPTNeoXTokenizerFast"),
    "olmo2": ("gpt2", "GPT2Tokenizer"),
}


def publish(folder: Path, config: hf.PreTrainedConfig, dtype: torch.dtype = torch.float32) -> None:
    """A model of this configuration with all that belongs to it, as version 4 of transformers wrote such folders."""
    from megatron.checkpoint.hf.companions import for_both
    from megatron.checkpoint.hf.config import architecture_of

    form, kind = USUAL.get(config.model_type, ("llama3", "PreTrainedTokenizerFast"))
    content = json.loads(tokenizer_json(form))
    ids = {each["content"]: each["id"] for each in content["added_tokens"]}
    config = copy.deepcopy(config)
    config.vocab_size = ROWS
    if getattr(config, "hidden_size_per_layer_input", 0):
        config.vocab_size_per_layer_input = ROWS
    config.bos_token_id, config.pad_token_id = ids["<|begin|>"], ids["<|pad|>"]
    config.eos_token_id = [ids["<|end|>"], ids["<|turn|>"]]
    config.initializer_range, config.our_note = 0.037, "kept"
    model = hf.AutoModelForCausalLM.from_config(config)
    randomise(model, 3)
    model.to(dtype).save_pretrained(folder)
    settings = for_both(json.loads((folder / "config.json").read_text()), architecture_of(config))
    written = {
        "config.json": settings | {"dtype": "bfloat16"},
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
            "bos_token_id": ids["<|begin|>"],
            "eos_token_id": [ids["<|end|>"], ids["<|turn|>"]],
            "pad_token_id": ids["<|pad|>"],
        },
        "tokenizer.json": content,
        "tokenizer_config.json": {
            "tokenizer_class": kind,
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "additional_special_tokens": ["<|turn|>"],
            "chat_template": TEMPLATE,
            "model_max_length": 8192,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            **({"unk_token": "<unk>"} if form == "llama2" else {}),
        },
    }
    for name, values in written.items():
        (folder / name).write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")

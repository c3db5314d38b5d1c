"""Folders as any version of transformers opens them for a user. Imports nothing of ours.

python opened.py OUT.json TEXTS.json FOLDER ...        # a JSON object: each folder -> what was found
"""

import hashlib
import json
import os
import sys

import transformers

KNOWN = {}  # ids by the class and all rules of a tokenizer: folders share rules, and a thousand texts take a while
CHAT = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": " 4"}]


def opened(folder: str, texts: list) -> dict:
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except ValueError as error:
        return {"unknown": str(error)[:60]}
    own = ("_name_or_path", "transformers_version", "rope_parameters", "architectures", "torch_dtype")
    found = {"config": {name: value for name, value in config.to_dict().items() if name not in own}}
    found["rope"] = {name: value for name, value in (getattr(config, "rope_parameters", None) or {}).items() if value}
    if os.path.exists(f"{folder}/generation_config.json"):
        found |= of_model(folder)
    return found | of_tokenizer(folder, texts)


def of_model(folder: str) -> dict:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    generation = model.generation_config.to_diff_dict()
    return {"dtype": str(model.dtype), "class": type(model).__name__, "generation": generation}


def of_tokenizer(folder: str, texts: list) -> dict:
    found = {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rules = (type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str())
    if rules not in KNOWN:
        KNOWN[rules] = [
            tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] for special in (False, True)
        ]
    ids = KNOWN[rules]
    found["plain ids"], found["ids"] = (hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in ids)
    found["decoded"] = [tokenizer.decode(each) for each in ids[1][:20]]
    found["skipped"] = [tokenizer.decode(each, skip_special_tokens=True) for each in ids[1][:20]]
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "model_max_length", "padding_side")
    found |= {f"tokenizer {name}": getattr(tokenizer, name) for name in names}
    found["special"] = sorted(map(str, tokenizer.all_special_tokens))
    if tokenizer.chat_template:
        found["chat"] = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return found


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as file:
        given = json.load(file)
    result = {folder: opened(folder, given) for folder in sys.argv[3:]}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"version": transformers.__version__, "found": result}, file, default=str)

"""Run by a Python that has transformers 4: opens folders and saves its logits. Imports nothing of ours.

python version4.py FOLDER        # each FOLDER/<name>/model, with FOLDER/<name>/tokens.pt, gives FOLDER/<name>/logits.pt
"""

import sys
from pathlib import Path

import torch
import transformers

for place in sorted(Path(sys.argv[1]).iterdir()):
    own = {"use_mamba_kernels": False} if place.name.startswith(("jamba", "zamba")) else {}  # they need a GPU
    if place.name == "gemma2":  # its own default omits the caps of attention scores
        own = {"attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32, **own).eval()
    with torch.no_grad():
        logits = model(torch.load(place / "tokens.pt"), use_cache=False).logits
    torch.save({"logits": logits, "version": transformers.__version__}, place / "logits.pt")
    if (place / "model" / "tokenizer.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
        torch.save([tokenizer("abc")["input_ids"], tokenizer.eos_token_id], place / "tokenized.pt")

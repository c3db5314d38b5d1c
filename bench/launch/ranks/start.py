"""A rank of the peer of `bench/launch/start.py`: the shortest program that one would write with transformers."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

HIDDEN, LAYERS, HEADS = 32, 2, 4  # of configs/test/tiny_neox.yml
WORDS, LENGTH, SAMPLES = 64, 32, 8

dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
config = GPTNeoXConfig(**sizes, intermediate_size=4 * HIDDEN, vocab_size=WORDS)
model = DistributedDataParallel(GPTNeoXForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
tokens = torch.randint(WORDS, (SAMPLES // dist.get_world_size(), LENGTH))
loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(f"loss {float(loss):.4f}")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # the end of DistributedDataParallel's reducer may wait for a thread of gloo that waits for the GIL

"""A run of GPT-NeoX as far as its checkpoints go: a model with its names and shapes, trained and saved by DeepSpeed.

The model is written here from the published equations, tensor parallel as Megatron-LM cuts it, as a pipeline or as one
module. DeepSpeed trains it with AdamW on groups of parameters as GPT-NeoX makes them, and writes every file itself.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, STEPS, SAVED, LR = 2, 32, 4, 512, 24, 6, 3, 3e-3
ROTARY = HIDDEN // HEADS // 4


class Copy(torch.autograd.Function):
    """The same input on all tensor parallel ranks: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Sum(torch.autograd.Function):
    """The sum of partial results of all tensor parallel ranks."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gather(torch.autograd.Function):
    """The parts of all tensor parallel ranks next to each other."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


class Parallel(nn.Module):
    """Some of the rows or columns of a matrix, whose values are a function of its name."""

    def __init__(self, name: str, rows: int, columns: int, ranks: int, dim: int | None, bias: bool = True):
        super().__init__()
        self.ranks, self.dim = ranks, dim
        rank = dist.get_rank() if ranks > 1 else 0
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(rows, columns, generator=generator) * 0.1
        self.weight = nn.Parameter(whole.chunk(ranks, dim)[rank].clone())
        shift = torch.randn(rows, generator=generator) * 0.1
        self.bias = nn.Parameter((shift.chunk(ranks)[rank] if dim == 0 else shift).clone()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            return F.linear(Copy.apply(x) if self.ranks > 1 else x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        return (Sum.apply(y) if self.ranks > 1 else y) + self.bias


class Embedding(nn.Module):
    def __init__(self, ranks: int):
        super().__init__()
        self.word_embeddings = Parallel("embedding", VOCABULARY, HIDDEN, ranks, 0, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        weight, ranks = self.word_embeddings.weight, self.word_embeddings.ranks
        if ranks == 1:
            return F.embedding(tokens, weight)
        local = tokens - dist.get_rank() * len(weight)
        foreign = (local < 0) | (local >= len(weight))
        return Sum.apply(F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign[..., None], 0))


class Attention(nn.Module):
    def __init__(self, number: int, ranks: int):
        super().__init__()
        self.heads = HEADS // ranks
        self.query_key_value = Parallel(f"qkv{number}", 3 * HIDDEN, HIDDEN, ranks, 0)
        self.dense = Parallel(f"out{number}", HIDDEN, HIDDEN, ranks, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.query_key_value(x).view(batch, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        q, k, v = rotated(qkv[0]), rotated(qkv[1]), qkv[2]
        return self.dense(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    turned, rest = x[..., :ROTARY], x[..., ROTARY:]
    rates = 10000.0 ** (-torch.arange(0, ROTARY, 2).float() / ROTARY)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), rates).repeat(1, 2).to(x.dtype)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * angles.cos() + torch.cat([-second, first], -1) * angles.sin(), rest], -1)


class MLP(nn.Module):
    def __init__(self, number: int, ranks: int):
        super().__init__()
        self.dense_h_to_4h = Parallel(f"up{number}", 4 * HIDDEN, HIDDEN, ranks, 0)
        self.dense_4h_to_h = Parallel(f"down{number}", HIDDEN, 4 * HIDDEN, ranks, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class Block(nn.Module):
    def __init__(self, number: int, ranks: int, parallel: bool):
        super().__init__()
        self.parallel = parallel
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(number, ranks)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP(number, ranks)

    def forward(self, x: Tensor) -> Tensor:
        attended = x + self.attention(self.input_layernorm(x))
        return attended + self.mlp(self.post_attention_layernorm(x if self.parallel else attended))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Head(nn.Module):
    def __init__(self, ranks: int):
        super().__init__()
        self.final_linear = Parallel("head", VOCABULARY, HIDDEN, ranks, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.final_linear(x)
        return Gather.apply(logits) if self.final_linear.ranks > 1 else logits


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def specs(ranks: int, parallel: bool, tied: bool) -> list[Any]:
    """The layers by GPT-NeoX's numbers: embedding, a function, the blocks, a function, the last norm, the head."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if tied:
        first = TiedLayerSpec("embed", Embedding, ranks, tied_weight_attr="word_embeddings_weight")
        last = TiedLayerSpec("embed", Embedding, ranks, forward_fn=as_head, tied_weight_attr="word_embeddings_weight")
    else:
        first, last = LayerSpec(Embedding, ranks), LayerSpec(Head, ranks)
    blocks = [LayerSpec(Block, number, ranks, parallel) for number in range(LAYERS)]
    return [first, LayerSpec(Same), *blocks, LayerSpec(Same), LayerSpec(Norm), last]


def as_head(embedding: Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.word_embeddings.weight)


Embedding.word_embeddings_weight = property(lambda self: self.word_embeddings.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Whole(nn.Module):
    """The layers as one module, as without a pipeline."""

    def __init__(self, ranks: int, parallel: bool):
        super().__init__()
        self.sequential = nn.Sequential(*(spec.build() for spec in specs(ranks, parallel, False)))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.sequential(tokens), labels)


class Mpu:
    """Who is who where all ranks are tensor parallel."""

    def __init__(self):
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def get_model_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return dist.get_world_size()

    def get_model_parallel_group(self):
        return dist.group.WORLD

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.alone


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """With weight decay, and without: norms and biases."""
    decayed, bare = [], []
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                (bare if isinstance(each, nn.LayerNorm) or name == "bias" else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]


def train(folder: str, config_file: str, case: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """STEPS steps on the data of the configuration. After SAVED of them DeepSpeed saves into `folder`.

    Returns:
        The loss of each step, and this rank's parameters at the end.
    """
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    from megatron.config import load
    from megatron.data.loader import build_loader
    from megatron.engine.deepspeed.process import prepare_deepspeed

    tensor, stages, parallel = case.get("tensor", 1), case.get("stages", 0), case.get("parallel", False)
    prepare_deepspeed(torch.device("cpu"))
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    data = dist.get_world_size() // tensor // max(stages, 1)
    rank = dist.get_rank() if data > 1 else 0
    config = load([config_file], case.get("overrides", []), ranks=dist.get_world_size()).config
    loader = build_loader(config, data_rank=rank, data_ranks=data)
    if stages:
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
        layers = specs(tensor, parallel, case.get("tied", False))
        module = PipelineModule(layers, topology=topology, loss_fn=loss_of, partition_method="uniform")
    else:
        module = Whole(tensor, parallel)
    for parameter in module.parameters():
        parameter.model_parallel = tensor > 1
    optimizer = torch.optim.AdamW(groups_of(module), lr=LR, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)
    options = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": config.training.accumulation,
        "zero_optimization": {"stage": case["zero"]},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if case.get("bf16"):
        options |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    mpu = {"mpu": Mpu()} if tensor > 1 and not stages else {}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=options, **mpu)
    losses = []
    for step in range(STEPS):
        micro = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in loader.step(step).tokens.long()]
        losses.append(_pipelined(engine, micro) if stages else _whole(engine, micro))
        if step + 1 == SAVED:
            engine.save_checkpoint(folder, tag=f"global_step{SAVED}", client_state=client_state(SAVED))
    loader.close()
    return losses, {name: value.detach().float().numpy().copy() for name, value in module.named_parameters()}


def _pipelined(engine, micro: list[tuple[Tensor, Tensor]]) -> float:
    return float(engine.train_batch(iter(micro)))


def _whole(engine, micro: list[tuple[Tensor, Tensor]]) -> float:
    total = torch.zeros(())
    for tokens, labels in micro:
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / len(micro)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def client_state(iteration: int) -> dict[str, Any]:
    """State that GPT-NeoX gives DeepSpeed to keep, with random states."""
    return {
        "iteration": iteration,
        "args": {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "padded_vocab_size": 512},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }


def write_data(path: Path) -> None:
    """A file of tokens with something to learn in it."""
    from megatron.data.token_file import TokenFileWriter

    generator = np.random.default_rng(5)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(path, np.uint16) as writer:
        for _ in range(60):
            writer.append((np.arange(generator.integers(5, 60)) * 7 + generator.integers(VOCABULARY)) % VOCABULARY)

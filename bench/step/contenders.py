"""The training steps that `train_step.py` compares: ours, and a plain loop around transformers' GPTNeoX or Mamba2.

transformers has no RWKV-7. There the other side is our step with the recurrence of flash-linear-attention's plain
PyTorch reference under autograd. Only its `dplr_chunkwise` is used (`pip install fla-core einops triton`).

Every contender runs in its own process, starts from the same weights (functions of the seed), and reads the same
batches. All use one recipe: AdamW (fused), gradient clipping at 1.0, no weight decay on norms and biases. In bf16 the
optimizer updates fp32 masters on every side: ours, a model of bf16 weights ("eager", "compiled"), and a model of fp32
weights under autocast ("autocast", "autocast-compiled").
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.step.setup import BETAS, CLIP, EPSILON, LR, SHAPES, WEIGHT_DECAY, Setup, batch_tokens, configuration

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron.checkpoint.hf.architecture import Architecture
    from megatron.config import Config
    from megatron.parallel.layout.layout import Layout


class Contender(Protocol):
    """Trains the setup's model, in a process of its own."""

    def step(self, step: int) -> tuple[Any, Any]:
        """Train on the tokens of a step, and return loss and gradient norm."""

    def close(self) -> None:
        """End what it has started."""


class Ours:
    """The engine that trains.

    Args:
        rank, layout: of one rank of several. The ranks meet at the file `store`.
    """

    def __init__(
        self,
        setup: Setup,
        configure: Callable[[Setup], Config] | None = None,
        rank: int = 0,
        layout: Layout | None = None,
        store: str | None = None,
    ):
        import torch
        import torch.distributed as dist

        from megatron.engine.deepspeed.process import prepare_deepspeed
        from megatron.engine.engine import build_engine
        from megatron.parallel.layout.mesh import Mesh

        ranks = 1 if layout is None else layout.world_size
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))  # DeepSpeed reads them
        prepare_deepspeed(torch.device(setup.device))
        dist.init_process_group(
            "gloo" if setup.device == "cpu" else "cpu:gloo,cuda:nccl",
            rank=rank,
            world_size=ranks,
            init_method="tcp://127.0.0.1:0" if store is None else f"file://{store}",
        )
        self.setup = setup
        mesh = Mesh.single() if layout is None else Mesh.build(layout)
        self.engine = build_engine((configure or configuration)(setup), mesh, setup.device)

    def step(self, step: int) -> tuple[Any, Any]:
        import torch

        from megatron.data.batch import StepBatch

        parts = range(dict(self.setup.options).get("training.accumulation", 1))
        tokens = torch.cat([batch_tokens(self.setup, step + part) for part in parts])
        batch = StepBatch(step, tokens, torch.arange(tokens[..., 0].numel()).view(tokens.shape[:2]), 0)
        if self.engine.form.documents:
            from bench.step.packed import batch_documents

            documents, positions = batch_documents(self.setup, step)
            batch = replace(batch, documents=documents, positions=positions)
        result = self.engine.step(batch, LR)
        return result.loss, result.grad_norm

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def clip(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Clip as `clip_grad_norm_` does, in the same time, by a norm that is right on CPUs too. There torch's norm is 0.1
    to 0.5 % too small to compare two sides by it."""
    import torch

    from megatron.engine.deepspeed.sum_of_squares import sum_of_squares

    norm = sum_of_squares([parameter.grad for parameter in parameters if parameter.grad is not None]).sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
    return norm


class Transformers:
    """The loop that one writes by hand around `GPTNeoXForCausalLM`, `Mamba2ForCausalLM` or another model that `make`
    gives.

    Args:
        autocast: weights stay in fp32, and torch casts what matrix products read, where bf16 is asked for.
    """

    def __init__(
        self, setup: Setup, compiled: bool, make: Callable[[Setup], nn.Module] | None = None, autocast: bool = False
    ):
        import torch
        from torch import nn

        self.setup, self.torch = setup, torch
        self.model = (twin(configuration(setup)) if make is None else make(setup)).to(setup.device).train()
        self.masters = list(self.model.parameters())
        self.weights: list[nn.Parameter] | None = None
        self.autocast = autocast
        if setup.compute == "bf16" and not autocast:  # the model becomes bf16, the optimizer updates fp32 copies
            self.weights = [p for p in self.model.to(torch.bfloat16).parameters()]
            self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        groups = [
            {"params": [p for p in self.masters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.masters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPSILON, fused=True)
        self.forward = torch.compile(self.model) if compiled else self.model

    def step(self, step: int) -> tuple[Any, Any]:
        torch = self.torch
        tokens = batch_tokens(self.setup, step)[0].to(self.setup.device)
        with torch.autocast(self.setup.device, torch.bfloat16, enabled=self.autocast):
            loss = self.loss(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        if self.weights is not None:
            for master, weight in zip(self.masters, self.weights):
                master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        norm = clip(self.masters)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.weights is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return loss.detach(), norm

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of [M, S] labels, each at the token before it."""
        return self.forward(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss

    def close(self) -> None:
        pass


def exported(config: Config) -> tuple[Architecture, Any, dict[str, torch.Tensor]]:
    """transformers' architecture and configuration, and the initial values of ours by the names of its checkpoints,
    through the tables that export uses."""
    import torch

    from megatron.checkpoint.hf import convert
    from megatron.checkpoint.hf.config import hf_config
    from megatron.model.stack import build_model
    from megatron.parallel.layers.parameters import logical_of

    family = "llama" if config.model.mlp.gated else "gpt_neox"
    architecture, theirs_config = hf_config(config, "mamba2" if "mamba2" in config.model.layers else family)
    ours = {logical_of(p).name: p.detach() for p in build_model(config, dtype=torch.float32).parameters()}
    steps = convert.plan(architecture, ours, config.model)
    return architecture, theirs_config, dict(convert.to_hf(steps, ours.__getitem__))


def twin(config: Config) -> nn.Module:
    """transformers' model with the initial values of ours."""
    import transformers

    architecture, theirs_config, values = exported(config)
    theirs = transformers.AutoModelForCausalLM.from_config(theirs_config)
    in_memory = {disk: memory for memory, disk in architecture.aliases.items()}
    theirs.load_state_dict({in_memory.get(name, name): tensor for name, tensor in values.items()}, strict=True)
    return theirs


class LitGPT(Transformers):
    """The same loop around litgpt's `GPT`, with the loss of its `pretrain.py`. Only this class needs `pip install
    litgpt`. In bf16 its weights stay in fp32, as with its `bf16-mixed`."""

    def __init__(self, setup: Setup, compiled: bool):
        super().__init__(setup, compiled, litgpt_twin, autocast=setup.compute == "bf16")

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from litgpt.utils import chunked_cross_entropy

        return chunked_cross_entropy(self.forward(tokens), labels)


def litgpt_twin(setup: Setup) -> nn.Module:
    """litgpt's model with the initial values of ours, through transformers' names, which it converts."""
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_gpt_neox, copy_weights_hf_llama

    hidden, layers, heads = SHAPES[setup.shape]
    config = configuration(setup).model
    common = {"block_size": setup.sequence, "n_layer": layers, "n_embd": hidden, "n_head": heads, "norm_eps": 1e-5}
    common |= {"vocab_size": setup.vocabulary, "padded_vocab_size": setup.vocabulary}
    *_, weights = exported(configuration(setup))
    state: dict[str, Any] = {}
    if not config.mlp.gated:
        theirs = Config(**common, bias=True, attn_bias=True, parallel_residual=True, rotary_percentage=0.25)
        copy_weights_gpt_neox(theirs, state, weights)
    else:
        theirs = Config(
            **common,
            bias=False,
            parallel_residual=False,
            rotary_percentage=1.0,
            n_query_groups=config.attention.kv_heads,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=config.mlp.hidden_size,
        )
        copy_weights_hf_llama(theirs, {}, state, weights)
    model = GPT(theirs)
    model.load_state_dict(state, strict=True)
    return model


def with_fla(setup: Setup) -> Ours:
    """Our step with another recurrence of RWKV-7. Autograd keeps all its tensors."""
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise

    from megatron.kinds.rwkv import rwkv7

    def theirs(
        r: torch.Tensor,
        log_w: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        chunk: int,
        initial_BhNN: torch.Tensor | None = None,
        starts_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if initial_BhNN is not None or starts_BS is not None:
            raise NotImplementedError(
                "the contender fla trains whole samples: it takes no earlier state and no documents"
            )
        heads_first = [each.transpose(1, 2) for each in (r * r.shape[-1] ** 0.5, k, v, a, b, log_w)]  # it scales r
        y, state = dplr_chunkwise(*heads_first, chunk_size=min(chunk, r.shape[1]))
        return y.transpose(1, 2), state.mT

    def kept(function: Callable, *inputs: torch.Tensor | None) -> Any:
        return function(*inputs)

    module: Any = rwkv7
    module.wkv7, module.recomputed = theirs, kept
    return Ours(setup)


def with_compiled_blocks(setup: Setup) -> Ours:
    """Ours, which must not fall back to plain blocks. Its compiler works in this process and in children that it waits
    for, so that their time is known."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    warnings.filterwarnings("error", message="torch.compile failed")
    return Ours(replace(setup, options=(*setup.options, ("training.compile", "layer"))))


def with_option(name: str, value: Any) -> Callable[[Setup], Ours]:
    """Ours, with another value of a key."""
    return lambda setup: Ours(replace(setup, options=(*setup.options, (name, value))))


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "ours": Ours,
    "ours-fp8": with_option("precision.products", "fp8"),
    "ours-fa3": with_option("model.fused_attention.flash", "fa3"),
    "ours-varlen": with_option("model.fused_attention.documents", "varlen"),
    "ours-torch": with_option("model.kernels", "torch"),  # `ours` takes kernels of packages that are installed
    "ours-graphs": with_option("training.cuda_graphs", True),
    "ours-compiled": with_compiled_blocks,
    "ours-compiled-again": with_compiled_blocks,  # it finds what the one before it has left in the compiler's cache
    "eager": lambda setup: Transformers(setup, compiled=False),
    "compiled": lambda setup: Transformers(setup, compiled=True),
    "autocast": lambda setup: Transformers(setup, compiled=False, autocast=True),
    "autocast-compiled": lambda setup: Transformers(setup, compiled=True, autocast=True),
    "litgpt": lambda setup: LitGPT(setup, compiled=False),
    "litgpt-compiled": lambda setup: LitGPT(setup, compiled=True),
    "fla": with_fla,
}

USUAL = tuple(name for name in CONTENDERS if not name.startswith("ours-"))  # contenders where none are named


def has(name: str, shape: str, compute: str = "fp32") -> bool:
    """Whether a contender can train the shape in this type."""
    if name.startswith("autocast") and compute != "bf16":
        return False
    if name.startswith("litgpt") and (shape.startswith("mamba2") or find_spec("litgpt") is None):
        return False
    return name.startswith("ours") or (name == "fla") == shape.startswith("rwkv7")


def peak_memory(device: str) -> int:
    """Largest memory of this process so far, bytes: resident on CPU, allocated by torch on a GPU."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def serve(name: str, setup: Setup, pipe: Connection, make: Callable[[Setup], Contender] | None = None) -> None:
    """A contender's process: answers (first step, number of steps) with losses, norms, seconds (by the setup's clock),
    what it and its children worked, and peak memory.

    None ends it. An error goes to the other side as an exception.

    Args:
        make: gives the contender for the setup. None is the one of this file that has the name.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        contender = (make or CONTENDERS[name])(setup)
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            pipe.send(_run(contender, setup, *order))
        contender.close()
    except (KeyboardInterrupt, EOFError):
        return
    except Exception as error:
        pipe.send(RuntimeError(f"{name}: {type(error).__name__}: {error}"))
        raise


def _run(contender: Contender, setup: Setup, first: int, steps: int) -> dict[str, Any]:
    import torch

    wait = torch.cuda.synchronize if setup.device != "cpu" else lambda: None
    now = time.process_time if setup.clock == "cpu" else time.perf_counter
    wait()
    begin, before = now(), sum(os.times()[:4])
    results = [contender.step(step) for step in range(first, first + steps)]
    wait()
    seconds, worked = now() - begin, sum(os.times()[:4]) - before
    losses, norms = ([float(value) for value in column] for column in zip(*results))
    spent = {"seconds": seconds, "worked": worked}
    return {"losses": losses, "norms": norms, **spent, "peak": peak_memory(setup.device)}

"""A program: has inductor make the kernels of small models for a GPU that is not there, and prints how many, as JSON.

Traces, passes, loops and their fusion are inductor's own for an H100. Only the text of the kernels would need the GPU,
or Triton, and it is not written. The compiled functions give results without values.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.scheduler as scheduler
from torch import Tensor
from torch._dynamo import device_interface
from torch._inductor import ir
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megatron.config import Config, load
from megatron.kinds.common.attention import attend
from megatron.model.kernels.compile import choose_compilation
from megatron.model.stack import build_model
from tests.model.pretended_gpu import DEVICE, gradients_of, let_torch_handle_cuda_tensors

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    gcnArchName="",
)
SETTINGS = ("training.steps=100", "precision.compute=bf16", "training.compile=layer", "training.sequence_length=128")


VARIANTS = {
    "graphs": ("training.cuda_graphs=true",),
    "varlen": ("data.reset_attention_at_eod=true", "model.fused_attention.documents=varlen"),
}


@dataclass
class Found:
    """Kernels that inductor makes of the blocks of a model: of each kind of block once, forward and backward.

    Attributes:
        extent: how much of the blocks is compiled, as `choose_compilation` says.
        graphs: forward and backward passes apart.
        breaks: what ended a graph early.
        host: operations in them whose result is on the host.
        before, after: kernels without and with fusion.
        replayed: of each graph, whether it may be a CUDA graph, and how many of its inputs stay where they are.
        error: what went wrong.
    """

    extent: str = ""
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)
    host: list[str] = field(default_factory=list)
    before: int = 0
    after: int = 0
    replayed: list[tuple[bool, int]] = field(default_factory=list)
    error: str = ""


def pretend_a_gpu() -> None:
    """Answer inductor's questions to a GPU, and give torch the facts that a build without CUDA lacks."""
    engine = torch.autograd.grad
    let_torch_handle_cuda_tensors()

    def gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, **more: Any) -> Any:
        if outputs[0].device.type != DEVICE:  # of a pattern that inductor searches for
            return engine(outputs, inputs, grad_outputs, **more)
        return gradients_of(outputs, inputs, grad_outputs)

    torch.autograd.grad = gradients
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: H100
    torch.cuda.get_device_capability = lambda device=None: (H100.major, H100.minor)
    device_interface.CudaInterface.get_device_properties = staticmethod(torch.cuda.get_device_properties)
    device_interface.caching_worker_current_devices["cuda"] = 0
    device_interface.caching_worker_device_properties["cuda"] = [H100]
    scheduler.has_triton = lambda: True
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.joint_graph_constant_folding = False  # it would fill tensors
    attend.F = SimpleNamespace(scaled_dot_product_attention=fused_attention)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, attn_mask: Tensor | None, **_: Any) -> Tensor:
    """The choice of torch on a GPU. One built without CUDA would write attention out."""
    if attn_mask is None and q.shape[-1] == v.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    mask, causal = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2]), attn_mask is None
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)[0]


def kernels(nodes: Sequence[scheduler.BaseSchedulerNode]) -> int:
    """How many launches: results of a kernel with several are none, nor is memory that is only named."""
    nothing = (scheduler.NopKernelSchedulerNode,)
    return sum(not isinstance(each, nothing) and not isinstance(each.node, ir.MultiOutput) for each in nodes)


def lowering_into(found: Found) -> Callable[..., Callable]:
    """Inductor's inner compiler, which counts instead of writing code."""

    def lower(graph: GraphModule, inputs: Sequence[Any], is_backward: bool = False, **options: Any) -> Callable:
        plain = GraphModule(graph, deepcopy(graph.graph))
        found.graphs += 1
        if options["cudagraphs"] is not None and options["cudagraphs"].value:
            fits = get_first_incompatible_cudagraph_node(graph) is None
            found.replayed.append((fits, len(options["static_input_idxs"])))
        found.host += [
            str(node.target)
            for node in graph.graph.nodes
            if isinstance(value := node.meta.get("val"), Tensor) and value.device.type != DEVICE
        ]
        view_to_reshape(graph)
        with torch.no_grad():
            mode = fake_tensor_prop(graph, inputs)
        _recursive_record_original_output_strides(graph)
        with V.set_fake_mode(mode):
            _recursive_post_grad_passes(graph, is_inference=False)
            lowering = GraphLowering(graph, example_inputs=inputs, shape_env=ShapeEnv(), is_backward=is_backward)
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), DebugContext():
                lowering.run(*inputs)
                lowering.init_wrapper_code()
                _schedule(lowering, found)
        return boxed(plain)

    return lower


def _schedule(lowering: GraphLowering, found: Found) -> None:
    """Fuse the loops of a graph, as inductor does before it writes them down."""

    def before(nodes: list) -> list:
        found.before += kernels(nodes)
        return nodes

    with torch._inductor.config.patch(_pre_fusion_custom_pass=before):
        lowering._update_scheduler()
    found.after += kernels(lowering.scheduler.nodes)


def boxed(graph: GraphModule) -> Callable:
    """In the form that inductor's results have."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(graph.forward)


def compile_model(file: str) -> Found:
    """Forward pass of two samples. Backward passes are compiled with it.

    Args:
        file: of a configuration. After a +, one of `VARIANTS`.
    """
    config = configuration(file)
    found = Found(choose_compilation(config, DEVICE)[0])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, lower = torch.compile, lowering_into(found)
    given: dict[str, Any] = {}

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable:
        try:
            return compile_fx(graph, inputs, inner_compile=lower, config_patches=given.get("options"))
        except Exception:  # blocks would run as they are
            found.error = traceback.format_exc(limit=-12)
            raise

    def pretended(function: Callable, **options: Any) -> Callable:
        given.update(options)
        return compiled(function, dynamic=False, backend=backend)

    torch.compile = pretended
    try:
        with FakeTensorMode():
            model = build_model(config, device=DEVICE, dtype=torch.bfloat16, values=False)
            length = config.training.sequence_length
            sizes = {"positions": (2, length), "documents": (2, length), "samples": (2,)}
            channels = {name: zeros(*size) for name, size in sizes.items() if getattr(model.form, name)}
            model.stream(zeros(2, length), **channels)  # without the loss, whose kernels are compiled apart
    except Exception:  # whatever it is, it is this model's result, and the others continue
        found.error = traceback.format_exc(limit=-12)
    finally:
        torch.compile = compiled
    found.breaks = list(torch._dynamo.utils.counters["graph_break"])
    return found


def zeros(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.int64, device=DEVICE)


def configuration(file: str) -> Config:
    file, _, variant = file.partition("+")
    more = [*SETTINGS, *VARIANTS.get(variant, ())]
    if "moe" in load([file], more[:1], check_inputs=False).config.model.layers:
        more.append("model.moe.hidden_size=16")  # grouped products want multiples of 16 bytes in bf16 too
    return load([file], more, check_inputs=False).config


def main(files: list[str]) -> None:
    # A process for each: layers remember tensors, which belong to a mode, and settings of torch to a thread.
    with get_context("fork").Pool(1, pretend_a_gpu, maxtasksperchild=1) as processes:
        found = processes.map(compile_model, files, chunksize=1)
    json.dump({file: asdict(each) for file, each in zip(files, found)}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

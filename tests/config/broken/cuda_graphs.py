"""CUDA graphs where shapes or addresses change."""

from __future__ import annotations

from tests.config.broken.case import case

HERE = "CUDA graphs must have a GPU, and this machine has none"
ON = "training: {cuda_graphs: true}\n"

CUDA_GRAPHS = [
    case(
        "CUDA graphs without a GPU",
        ON + "precision: bf16",
        "a.yml:2: training.cuda_graphs = true",
        HERE,
        "use training.cuda_graphs=false",
    ),
    case(
        "CUDA graphs on CPUs, of fp32",
        ON + "launch: {device: cpu}",
        "launch.device = 'cpu' (a.yml:3)",
        "CUDA graphs must have a GPU",
        "CUDA graphs must have 16-bit gradients, which are summed elsewhere",
        "use training.cuda_graphs=false, or precision.compute=bf16",
        problems=2,
    ),
    case(
        "CUDA graphs of weights that move",
        ON + "precision: bf16\nzero: {stage: 3}",
        "zero.stage = 3 (a.yml:4)",
        "CUDA graphs must have weights that stay where they are",
        "or zero.stage=2",
        problems=2,
    ),
    case(
        "CUDA graphs of blocks in pieces",
        "training: {cuda_graphs: true, compile: 'off', activation_checkpointing: {mode: full}}\nprecision: bf16",
        "training.compile = 'off' (a.yml:2)",
        "CUDA graphs must have compiled blocks",
        "CUDA graphs must have each pass of a block once a step",
        problems=3,
    ),
    case(
        "CUDA graphs of stages",
        ON + "precision: bf16\nparallel: {pipeline: 2}",
        "CUDA graphs must have one micro-batch at a time",
        problems=2,
    ),
    case(
        "CUDA graphs of experts",
        ON + "precision: bf16\nmodel: {layers: attention/moe x4, moe: {experts: 4, top_k: 2}}",
        "model.layers = 'attention/moe x4' (a.yml:4)",
        "must be false with moe: it is not compiled as a whole, with fixed shapes",
        "use training.cuda_graphs=false, or attention/mlp blocks",
        problems=2,
    ),
    case(
        "CUDA graphs of dropout",
        ON + "precision: bf16\nmodel: {attention: {dropout: 0.1}}",
        "must be false with attention: dropout draws new",
        problems=2,
    ),
]

"""Optimizers and their parameter groups.

`groups.build_optimizer` makes one torch optimizer for the parameters of this rank. AdamW, Lion and SGD work element by
element, so ZeRO may flatten and cut their parameters. Muon needs whole matrices: a `MatrixOptimizer` gets them on every
layout.

Each optimizer is a file. `facts.py` has the facts of all of them, without torch
(`megatron.config.optimizer_kind.OptimizerKind`)."""

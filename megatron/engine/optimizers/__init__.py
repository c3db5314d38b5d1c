"""Optimizers and their parameter groups.

`groups.build_optimizer` makes one torch optimizer for the parameters of this rank. AdamW, Lion and SGD work element by
element, so ZeRO may flatten and cut their parameters. Muon needs whole matrices: a `MatrixOptimizer` gets them on every
layout.

Each optimizer is a folder: `options.py`, its facts without torch (`megatron.config.optimizer_kind.OptimizerKind`),
and `update.py`, its class.
"""

"""Imports of most engines, for a process from which ranks are forked (`megatron.testing.ranks`, rehearsals)."""

from __future__ import annotations

import gc

import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import setuptools  # noqa: F401

import megatron.engine.engine  # noqa: F401
from megatron.config.kind import kinds_of
from megatron.config.schema import catalog

for kind in kinds_of().values():
    _ = kind.module
catalog()  # of all keys, made at the first use
gc.collect()
gc.freeze()  # shared with the workers, whose collections skip it

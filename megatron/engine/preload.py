"""Imports of most engines, for a process from which ranks are forked (`megatron.testing.ranks`, rehearsals)."""

import gc

import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops  # noqa: F401
import setuptools  # noqa: F401

import megatron.engine.engine  # noqa: F401
from megatron.config.schema import catalog
from megatron.engine.deepspeed.process import import_muon

import_muon()
catalog()  # of all keys, made at the first use
gc.collect()
gc.freeze()  # shared with the workers, whose collections skip it

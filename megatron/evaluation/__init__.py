"""Evaluation: scoring on any layout, EleutherAI's harness, probes, memorisation."""

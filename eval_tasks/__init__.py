"""Benchmarks: EleutherAI's evaluation harness on a model of any layout, and the project's own tasks."""

"""The project's own tasks for EleutherAI's evaluation harness; `megatron.evaluation` runs them."""

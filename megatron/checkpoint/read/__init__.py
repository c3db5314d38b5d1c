"""Reading checkpoints: read plans, ownership of fragments, comparison."""

"""Everything that replaces or patches DeepSpeed's names."""

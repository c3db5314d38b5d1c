"""The model: the residual stream, the blocks that read and write it, and their counts."""

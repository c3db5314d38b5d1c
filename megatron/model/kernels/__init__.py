"""Choice of kernels: torch, torch.compile, CUDA graphs, FlashAttention."""

"""Sparse latent attention with a lightning indexer (DeepSeek-V3.2)."""

"""RWKV-6 "Finch"."""

"""RWKV-7 "Goose"."""

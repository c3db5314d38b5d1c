"""RWKV-5 "Eagle"."""

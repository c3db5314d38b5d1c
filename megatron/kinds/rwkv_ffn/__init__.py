"""The channel mixes of RWKV-4 to 7."""

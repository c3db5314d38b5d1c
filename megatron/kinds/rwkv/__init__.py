"""RWKV-4 to 7: their mixers, and their channel mixes as feed-forward networks."""

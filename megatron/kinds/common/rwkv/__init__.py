"""Parts of the RWKV mixers and feed-forward networks."""

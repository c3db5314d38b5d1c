"""What the RWKV mixers and feed-forward networks share."""

"""How a run is split: the layout, shards of logical tensors, and the layers and collectives made of them."""

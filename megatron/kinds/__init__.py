"""The kinds of layers. All about one kind is in its folder. `megatron/config/registry.py` names it."""

"""Optional parts of a run. All about one feature is in its folder, and `megatron/config/registry.py` names it."""

"""One small file per way of starting agents on hosts. `megatron/config/registry.py` names each."""

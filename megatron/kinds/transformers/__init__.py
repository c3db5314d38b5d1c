"""Any causal language model of transformers as the whole model: its own class, its names, its settings."""

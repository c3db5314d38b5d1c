"""An end-to-end LLM pretraining framework: one YAML in, a trained model out, on any layout."""

__version__ = "0.1.0"

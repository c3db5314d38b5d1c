"""The reader of GPT-NeoX's flat YAML: every key of it becomes native keys, a line of the summary, or a problem."""

from .reader import Translation
from .translate import is_flat, to_native_yaml, translate

__all__ = ["Translation", "is_flat", "to_native_yaml", "translate"]

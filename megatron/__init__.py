"""deepy: an end-to-end LLM pretraining framework. One YAML in, a trained model out, on any layout."""

from pkgutil import extend_path

__version__ = "0.2.0"
# NVIDIA's Megatron-Core installs `megatron/core` into a folder of its own, without an `__init__.py`. Parts of
# `megatron` elsewhere on sys.path stay importable beside this package; where both have a name, this package's is taken.
__path__ = extend_path(__path__, __name__)

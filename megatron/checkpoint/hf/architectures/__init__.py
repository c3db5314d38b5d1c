"""The architectures that models can be exchanged with, a family per file. The registry names each."""

"""The architectures that models can be exchanged with, a family a file. The registry names each."""

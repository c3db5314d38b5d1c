"""Layout arithmetic, process groups, and how a logical tensor is cut over them."""

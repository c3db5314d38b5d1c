"""Parts of several kinds of layers."""

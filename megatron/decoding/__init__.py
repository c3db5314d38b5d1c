"""Decoding: many texts at once, each with the tokens that it has by itself."""

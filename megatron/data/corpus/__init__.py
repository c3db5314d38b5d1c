"""From texts to token files: reading inputs, encoding in parallel, training tokenizers, well-known corpora."""

"""Models exchanged with Hugging Face transformers: one table per architecture, read in both directions."""

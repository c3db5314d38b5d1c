"""Conversations to token files with labels: supervised fine-tuning."""

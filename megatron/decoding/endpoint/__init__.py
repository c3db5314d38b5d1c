"""An OpenAI-compatible endpoint: requests join and leave the decoder's passes."""

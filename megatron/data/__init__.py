"""Tokenizers, token files, sample order, blends, the loader, provenance.

Nothing is imported here, so that tools which need only a token file start without torch."""

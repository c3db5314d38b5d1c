"""Curation of texts: recipes of readers, filters and deduplication, run by datatrove's executors. No torch here."""

"""Cleaning of documents: normalization, filters, deduplication."""

"""Data: text to packed rows, and rows to batches."""

"""Conversations: reading records, rendering chat templates, encoding to token ids with a loss mask."""

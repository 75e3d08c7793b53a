"""Recipes: their keys, reading and checking them, durations, the JSON schema."""

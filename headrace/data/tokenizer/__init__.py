"""Tokenizers: loading, training, converting, and the libraries that encode."""

"""Headrace: language models on TPUs, GPUs and CPUs, from raw text to an exported model."""

__version__ = "0.1.0"

"""Kernels: arrays in, arrays out, no config."""

"""Inference: generation, sampling, diffusion decoding, lm-eval, serving."""

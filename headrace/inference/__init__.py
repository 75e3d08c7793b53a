"""Inference: generation, sampling, diffusion decoding, lm-evaluation-harness, serving."""

"""Cross entropy fused with the head that computes logits: one file per backend of `loss.backend`."""

"""Checkpoints: the state of training, saving and restoring it, manifests, differences, opening a run."""

"""Rent TPU slices, train on them, replace them after a preemption, and delete them at the end."""

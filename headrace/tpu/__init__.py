"""TPU slices by one command: rented, set up, trained on, taken again after a preemption, and given back."""

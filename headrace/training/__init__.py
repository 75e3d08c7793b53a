"""Training: the run, the loop, the step, evaluation, rollback."""

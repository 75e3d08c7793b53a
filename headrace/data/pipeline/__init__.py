"""Data preparation: the stages that make packed data, and the processes that run them."""

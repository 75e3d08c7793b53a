"""Planning: the memory, time and cost of a recipe on a slice."""

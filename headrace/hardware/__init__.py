"""Tables of chips, prices and slice names."""

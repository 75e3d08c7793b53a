"""Numbers of 8 bits and fewer: rounding, grids, packed bits, and matmuls in fp8, int8 and ternary."""

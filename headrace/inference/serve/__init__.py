"""`headrace serve`: what was trained behind an address, for looking at it; not for production."""

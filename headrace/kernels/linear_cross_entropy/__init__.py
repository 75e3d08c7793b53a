"""Cross entropy fused with the head, in one file for each way to split the work."""

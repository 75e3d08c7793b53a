"""Files on disks and in buckets, locks, and the redaction of secrets. No JAX."""

"""Initialization of a run from another model: a run folder, or a Hugging Face folder.

check.py decides which weights it provides, load.py reads them onto the devices, and vocab_rows.py maps the
tokens of the two vocabularies."""

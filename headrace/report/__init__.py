"""The report of a run: facts of its folder, charts, one HTML page."""

"""Measured comparisons; results are dated files."""

"""Measurements: each script compares with its peers in the same run and writes a JSON of what it found."""

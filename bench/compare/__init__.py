"""`make bench-compare`: two revisions side by side, measured in turns."""

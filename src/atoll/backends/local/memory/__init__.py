"""Saved memories of sandboxes: their files, their seal, and whether one can be started from here."""

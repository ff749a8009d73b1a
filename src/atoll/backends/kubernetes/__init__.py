"""Sandboxes as pods of a cluster."""

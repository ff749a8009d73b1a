"""Layers: read, verify, unpack, store."""

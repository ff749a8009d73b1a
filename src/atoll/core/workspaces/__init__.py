"""Workspaces: snapshots by content, archives, manifests."""

"""Volumes: named disks of an owner that outlive sandboxes and can be in several at once (docs/volumes.md)."""

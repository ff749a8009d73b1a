"""The records of a daemon: the statements, and the two databases that carry them out."""

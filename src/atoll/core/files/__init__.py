"""Files and ports of a sandbox."""

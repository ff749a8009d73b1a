"""The life of a sandbox: create, claim, stop, start, destroy, recovery after a restart."""

"""Where sandboxes live: `contract.py` is what core sees, each folder is one place."""

"""The `fn` and `iii` verbs of the command line."""

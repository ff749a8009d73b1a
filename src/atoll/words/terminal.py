"""What runs on a terminal that was opened without a program."""

SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"

"""The program of a terminal that was opened without one."""

SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"

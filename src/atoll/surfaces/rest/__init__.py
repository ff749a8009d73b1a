"""atoll's own HTTP interface."""

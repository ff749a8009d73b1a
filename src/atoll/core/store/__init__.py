"""The database of one machine's daemon."""

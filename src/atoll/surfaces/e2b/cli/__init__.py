"""The command line of this surface."""

"""The control plane: REST keyed by API key, each route a few lines from a verb of core."""

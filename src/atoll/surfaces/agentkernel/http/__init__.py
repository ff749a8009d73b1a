"""agentkernel's HTTP interface: its routes, envelopes and event streams, each a few lines from a verb of core."""

"""How a sandbox of this machine is isolated: engines, their probes and what differs between them."""

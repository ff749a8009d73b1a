"""What tests share: daemons, sandboxes, networks and callers, and ways to wait for them."""

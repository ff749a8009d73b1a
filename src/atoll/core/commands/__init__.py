"""Commands in a sandbox: start, stream, poll, kill, and what is remembered of them."""

"""The daemon's side of the broker: starts it, tells it what is allowed, hears what was refused."""

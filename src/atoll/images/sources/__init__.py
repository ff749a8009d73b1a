"""Images made on this machine: its own /usr, Debian package sets."""

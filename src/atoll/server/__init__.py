"""The daemon: listeners, limits on requests, certificates, exposed ports."""

"""Parsers of what a sandbox sends: DNS, TLS hello, HTTP head. All input is hostile."""

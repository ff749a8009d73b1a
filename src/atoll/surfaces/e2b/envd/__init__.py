"""What the SDKs find behind port 49983 of a sandbox. The daemon serves it; nothing listens there inside."""

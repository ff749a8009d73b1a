"""The service the SDKs find at port 49983 of a sandbox. The daemon serves it; nothing listens there inside."""

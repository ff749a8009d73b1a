"""The gRPC surface: sandbox.v1 (K8E). REST is on the same TLS port."""

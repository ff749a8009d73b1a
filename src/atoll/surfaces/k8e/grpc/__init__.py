"""The gRPC surface: sandbox.v1 (K8E) and atoll.v1 on one port."""

"""K8E's gRPC service, command line and SDK."""

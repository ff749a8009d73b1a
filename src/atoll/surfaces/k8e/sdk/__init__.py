"""`SandboxClient`, K8E's client for Python."""

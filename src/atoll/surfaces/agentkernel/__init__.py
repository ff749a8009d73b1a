"""agentkernel's command line and HTTP interface."""

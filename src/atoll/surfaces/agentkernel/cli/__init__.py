"""The command line of agentkernel's document, on the same parser and core as everything else."""

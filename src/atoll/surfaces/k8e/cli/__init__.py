"""The verbs of the command line that only K8E's contract has."""

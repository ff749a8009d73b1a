"""iii's sixteen `sandbox::*` functions: by REST, by the command line, and as a worker of an iii engine."""

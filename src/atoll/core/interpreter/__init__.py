"""The code interpreter: Jupyter kernels behind a server in the sandbox, and the verbs that use it."""

"""The image `code-interpreter-v1`: this machine's programs, Jupyter kernels, and packages for data."""

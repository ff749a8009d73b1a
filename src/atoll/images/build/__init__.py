"""Image builds: from a Dockerfile and a context to a stored image. `engine.py` has the order of things, docs/image-builds.md the rules."""

"""The broker process: resolver and connection broker, the only way out of a sandbox."""

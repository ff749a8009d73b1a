"""Programs that run inside a sandbox of the image `code-interpreter-v1`. Nothing of atoll itself imports them."""

"""Image builds in sandboxes: uploads, steps, and the verbs around them. The engine is `atoll.images.build`."""

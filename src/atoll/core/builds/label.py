"""The label of sandboxes that belong to a build: a new daemon ends those that an earlier one has left."""

LABEL = "atoll.build"

"""One folder per contract that atoll speaks. A surface translates to core's verbs and holds no logic."""

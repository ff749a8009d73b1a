"""Skills: the texts that teach a coding agent to use atoll, and putting them, with an MCP entry, where each agent looks."""

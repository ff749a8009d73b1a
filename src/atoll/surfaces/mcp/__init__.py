"""The MCP front door: tools over the verbs of core, on stdio (through the light `atoll mcp`) and on HTTP."""

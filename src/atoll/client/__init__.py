"""The client: one sans-I/O protocol core, a blocking and an asyncio driver, `Sandbox` and `AsyncSandbox` on top."""

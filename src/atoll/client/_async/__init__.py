"""The asyncio faces: the source that the blocking ones are generated from."""

"""Fixtures of the gRPC tests."""

import asyncio

import pytest
import uvloop


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The daemon runs on uvloop, whose TLS is not asyncio's. gRPC keeps to the kind of loop it saw first."""
    return uvloop.EventLoopPolicy()

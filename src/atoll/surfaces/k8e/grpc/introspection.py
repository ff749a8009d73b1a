"""Server reflection, for callers that are known. Health is gRPC's own servicer, open to anybody who can connect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from atoll.core.access.principals import Principal

SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


class Reflection:
    """gRPC's reflection answers, one request at a time, behind the same guard as every other service."""

    def __init__(self, names: Iterable[str]) -> None:
        self._answers: Any = ReflectionServicer([*names, SERVICE.full_name])

    async def ServerReflectionInfo(self, who: Principal, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            answers: Iterator[Any] = self._answers.ServerReflectionInfo(iter([request]), None)
            for answer in answers:
                yield answer

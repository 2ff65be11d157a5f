"""Asks a process for its gRPC health.

Owns: the call. Must not know: who asks, and what follows from an answer.
"""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc


class HealthClient:
    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._timeout_s = timeout_s

    async def is_well(self, service: str) -> bool | None:
        """Whether that service, by its full name, is SERVING ("" stands for the whole process). None: no answer, or one
        that cannot be read."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await self._stub.Check(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError:
            return None
        if answer is None:  # gRPC's word for a message that is none
            return None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

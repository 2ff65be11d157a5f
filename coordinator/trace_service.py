"""TraceService: what was done for a request, for whoever has no trace backend.

Owns: the RPC. Must not know: how spans come about.
"""

from __future__ import annotations

from typing import Any

from coordinator.tracing import MAX_TRACES, Tracing
from specpipe.codec_trace import trace_to_pb
from specpipe.errors import TraceNotFoundError
from specpipe.rpc.v1 import trace_pb2, trace_pb2_grpc

SERVICE_NAME = "specpipe.rpc.v1.TraceService"


class TraceService(trace_pb2_grpc.TraceServiceServicer):
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def GetTrace(  # noqa: N802 (the name is the RPC's)
        self,
        request: trace_pb2.GetTraceRequest,
        context: Any,  # noqa: ARG002
    ) -> trace_pb2.GetTraceResponse:
        """Raises TraceNotFoundError."""
        kept = self._tracing.find(request.request_id)
        if kept is None:
            raise TraceNotFoundError(
                f"no trace is kept of {request.request_id!r}: it was not traced, or is not among the last {MAX_TRACES} "
                "that were. Ask with specpipe generate --trace (trace: true), or have the service trace every request: "
                "--trace-sample 1, at trace level round or debug"
            )
        return trace_to_pb(kept)

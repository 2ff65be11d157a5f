"""What the two ends of a worker stream say of themselves, as protobuf and back: Hello, ModelInfo, Heartbeat.

Owns: those messages. Must not know: sessions; see specpipe.codec for the rules of both directions.
"""

from __future__ import annotations

from dataclasses import replace

from specpipe.codec_fields import MAX_NAME_LENGTH, is_duration, values_of
from specpipe.errors import InvalidRequestError
from specpipe.rpc.v1 import common_pb2, worker_pb2
from specpipe.types import Heartbeat, Hello, ModelInfo, ProcessInfo


def hello_to_pb(hello: Hello) -> worker_pb2.Hello:
    return worker_pb2.Hello(
        protocol_version=hello.protocol_version,
        incarnation=hello.incarnation,
        model=None if hello.model is None else model_info_to_pb(hello.model),
        num_slots=hello.num_slots,
        max_sessions=hello.max_sessions,
        process=worker_pb2.ProcessInfo(**values_of(hello.process)),
        minor_version=hello.minor_version,
    )


def hello_from_pb(hello_pb: worker_pb2.Hello) -> Hello:
    return Hello(
        protocol_version=hello_pb.protocol_version,
        incarnation=hello_pb.incarnation,
        model=model_info_from_pb(hello_pb.model) if hello_pb.HasField("model") else None,
        num_slots=hello_pb.num_slots,
        max_sessions=hello_pb.max_sessions,
        process=ProcessInfo(
            host=hello_pb.process.host[:MAX_NAME_LENGTH],
            pid=hello_pb.process.pid,
            version=hello_pb.process.version[:MAX_NAME_LENGTH],
        ),
        minor_version=hello_pb.minor_version,
    )


def model_info_to_pb(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(**values_of(model))


def model_info_from_pb(model_pb: common_pb2.ModelInfo) -> ModelInfo:
    if model_pb.vocab_size < 1 or model_pb.max_context < 1:
        raise InvalidRequestError("model has no vocabulary or no context")
    return ModelInfo(
        name=model_pb.name,
        fingerprint=model_pb.fingerprint,
        tokenizer_fingerprint=model_pb.tokenizer_fingerprint,
        vocab_size=model_pb.vocab_size,
        max_context=model_pb.max_context,
        eos_token_ids=tuple(model_pb.eos_token_ids),
    )


def heartbeat_to_pb(heartbeat: Heartbeat) -> worker_pb2.Heartbeat:
    return worker_pb2.Heartbeat(**values_of(heartbeat))


def heartbeat_from_pb(heartbeat_pb: worker_pb2.Heartbeat) -> Heartbeat:
    """A time that is none counts as no step: patience is reckoned from it, and would never end."""
    heartbeat = Heartbeat(**values_of(heartbeat_pb, Heartbeat))
    return heartbeat if is_duration(heartbeat.step_running_ms) else replace(heartbeat, step_running_ms=0.0)

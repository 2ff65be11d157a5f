"""Configuration of each process, read once at start and never changed.

Owns: frozen dataclasses, one line of documentation per field. What is learned at run time lives in ModelInfo.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from specpipe.errors import ConfigError
from specpipe.types import Mode, Rule

MAX_SPECULATIVE_TOKENS: Final = 256  # K of a request at most
DEFAULT_SYNC_K: Final = 4  # K in sync mode where nobody names one

TraceLevel = Literal["off", "request", "round", "debug"]
TRACE_LEVELS: Final[tuple[str, ...]] = get_args(TraceLevel)


def check_counts(config: Any, *names: str, least: int = 1, most: int | None = None) -> None:
    """Raise ConfigError, naming the field, for one that is given and below `least` or above `most`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
        if value is not None and most is not None and value > most:
            raise ConfigError(f"{name} must be at most {most}, got {value}")


def check_k(num_speculative_tokens: int | None) -> None:
    """Raise ConfigError for a K that no request may have."""
    if num_speculative_tokens is not None and not 1 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"num_speculative_tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, got {num_speculative_tokens}"
        )


def check_port_number(name: str, port: int | None) -> None:
    """Raise ConfigError for a port that is given and cannot be one."""
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"{name} must be in 0..65535, got {port}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files, in PEM, with which a process shows who it is and checks its peers; none: plain connections."""

    cert: str = ""  # certificate of this process, and whatever leads from it to the CA
    key: str = ""  # its private key
    ca: str = ""  # certificate of the CA that peers' certificates are signed by

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("tls_cert and tls_key are given together or not at all")

    @property
    def is_on(self) -> bool:
        return bool(self.cert or self.ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a process listens and how it ends."""

    host: str = "127.0.0.1"  # interface to listen on
    port: int = 0  # 0: a free one
    health_port: int | None = None  # where health is answered too, alone and without TLS; 0: a free one; None: nowhere
    tls: TlsConfig = field(default_factory=TlsConfig)  # of all calls to this process and of its calls to workers
    grace_s: float = 10.0  # how long SIGTERM lets sessions finish
    ready_fd: int | None = None  # file descriptor on which ready_text is written, a line, once the process serves
    ready_text: str = "{address}"  # {address} stands for HOST:PORT
    parent_fd: int | None = None  # read end of a pipe held by the parent: end-of-file means the parent is gone

    def __post_init__(self) -> None:
        check_port_number("port", self.port)
        check_port_number("health_port", self.health_port)
        if not self.grace_s >= 0:
            raise ConfigError(f"grace_s must be at least 0, got {self.grace_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What a process says about itself, and to whom."""

    otlp_endpoint: str = ""  # HOST:PORT of an OTLP/gRPC receiver of spans and metrics; empty: nothing is pushed
    trace_level: TraceLevel = "round"  # what is kept of a request that is traced
    trace_sample: float | None = None  # share of requests traced where the caller has not decided; None: 1 if exported
    has_content: bool = False  # prompts and answers are part of spans
    metrics_port: int | None = None  # where Prometheus finds /metrics; 0: a free port; None: nowhere

    def __post_init__(self) -> None:
        if self.trace_level not in TRACE_LEVELS:
            raise ConfigError(f"trace_level must be one of {', '.join(TRACE_LEVELS)}, got {self.trace_level!r}")
        if self.trace_sample is not None and not 0 <= self.trace_sample <= 1:
            raise ConfigError(f"trace_sample must be from 0 to 1, got {self.trace_sample}")
        check_port_number("metrics_port", self.metrics_port)


ROUNDED = "int8"  # the dtype of a draft whose weights are rounded to 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A model and the room it gets."""

    model: str  # local folder or hub name
    dtype: str = "auto"  # auto | float32 | bfloat16 | int8 (drafts only)
    device: str = "cpu"  # cpu | cuda
    max_context: int | None = None  # positions; None: the model's own limit (at most 4096 slots a session by default)
    num_slots: int | None = None  # KV slots; None: by memory
    max_sessions: int = 64  # sessions open at once
    max_batch_tokens: int = 256  # rows of one step
    has_prefix_cache: bool = True  # computed prefixes are shared among sessions, and cached while slots are free
    num_threads: int = 1  # compute threads
    core: int | None = None  # CPU core to pin the process to; None: not pinned

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", ROUNDED):
            raise ConfigError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device must be cpu or cuda, got {self.device!r}")
        check_counts(self, "max_context", "num_slots", "max_sessions", "max_batch_tokens", "num_threads")
        if self.num_slots == 1:
            raise ConfigError("num_slots must be at least 2, got 1: the first slot is scratch and holds no token")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWorkerConfig:
    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    engine: EngineConfig
    max_nodes: int = 256  # nodes of one session's draft tree
    max_depth: int = 48  # its depth

    def __post_init__(self) -> None:
        check_counts(self, "max_nodes", "max_depth")


MIN_RANK_TOKEN_LENGTH: Final = 16
RANK_TOKEN_VARIABLE: Final = "SPECPIPE_RANK_TOKEN"  # a flag would be seen by everybody on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """Which rank of a target worker this process is, where each is started by its own command on its own host."""

    rank: int  # 0: the one that serves
    address: str  # HOST:PORT; rank 0 listens there, the others dial it
    token: str = field(repr=False)  # a secret of this target worker's ranks

    def __post_init__(self) -> None:
        check_counts(self, "rank", least=0)
        if len(self.token) < MIN_RANK_TOKEN_LENGTH:
            raise ConfigError(f"token must be of {MIN_RANK_TOKEN_LENGTH} characters or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWorkerConfig:
    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    engine: EngineConfig
    tensor_parallel_size: int = 1  # ranks of this worker
    rank_cores: tuple[int, ...] = ()  # CPU cores of the ranks after the first, which has engine.core; may be fewer
    rendezvous: RendezvousConfig | None = None  # None: rank 0 starts the others, on its own host
    max_nodes: int = 256  # nodes held of one session's draft tree
    max_shared_slowdown: float = 1.25  # a step shared by sessions may take this many times its plain time
    max_prefill_slowdown: float = 2.0  # a step with prefill may take this many times its decode part

    def __post_init__(self) -> None:
        check_counts(self, "tensor_parallel_size", "max_nodes")
        if self.rendezvous is not None and self.rendezvous.rank >= self.tensor_parallel_size:
            raise ConfigError(f"rank must be below {self.tensor_parallel_size}, got {self.rendezvous.rank}")
        if self.engine.dtype == ROUNDED:
            raise ConfigError(f"dtype {ROUNDED} is for draft workers: a target with rounded weights says other things")
        for name in ("max_shared_slowdown", "max_prefill_slowdown"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    http_port: int | None = None  # where the live page is served, on the server's interface; 0: a free port
    is_http_port_preferred: bool = False  # if it is taken, a free one does as well
    targets: tuple[str, ...]  # HOST:PORT of a target worker, or dns:HOST:PORT of all that the name stands for
    drafts: tuple[str, ...] = ()  # the same for draft workers
    tokenizer: str = ""  # folder or hub name; empty: the target model's name
    drafter: str = "model"  # model | ngram | none: what drafts when a request does not forbid it
    mode: Mode = Mode.PIPELINED  # default of requests
    rule: Rule = Rule.COUPLED  # default of requests
    num_speculative_tokens: int | None = None  # default K; None: 4 in sync, by goodput in pipelined
    max_sessions: int = 256  # requests answered at once; more wait in a queue
    max_queue: int = 1024  # requests waiting; more are refused
    served_model_name: str = ""  # name clients use; empty: the target's folder name

    def __post_init__(self) -> None:
        check_counts(self, "max_sessions")
        check_counts(self, "max_queue", least=0)
        check_k(self.num_speculative_tokens)
        check_port_number("http_port", self.http_port)

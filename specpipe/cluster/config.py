"""What CLUSTER.yaml asks for.

Owns: frozen dataclasses, one line of documentation per field, and their checks. Must not know: YAML (`reading`), Ray,
flags of processes (`plan`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from specpipe.cluster.autoscale import MAX_COUNT, AutoscaleConfig
from specpipe.config import TelemetryConfig, TlsConfig, check_counts, check_k, check_port_number
from specpipe.errors import ConfigError
from specpipe.launcher.plan import NGRAM, NONE, START_TIMEOUT_S
from specpipe.launcher.restarts import FIRST_DELAY_S, MAX_DELAY_S, STABLE_AFTER_S
from specpipe.telemetry.logs import LogLevel
from specpipe.types import Mode, Rule

DEMO: Final = "demo"  # a model of the demo pair, wherever a node has specpipe
LOCAL: Final = "local"
MAX_AMOUNT: Final = 1e6  # of a resource: Ray counts in ten-thousandths, in 64 bits

Placement = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Which Ray."""

    address: str = (
        LOCAL  # local: a fresh one here | auto: the one this machine is part of | HOST:PORT | ray://HOST:PORT
    )
    namespace: str = "specpipe"  # of the names of our actors

    def __post_init__(self) -> None:
        if not re.fullmatch(r"local|auto|(ray://)?[^\s/]+:\d+", self.address):
            raise ConfigError(f"address must be local, auto, HOST:PORT or ray://HOST:PORT, got {self.address!r}")
        if not self.namespace:
            raise ConfigError("namespace must not be empty")

    @property
    def is_local(self) -> bool:
        return self.address == LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """What is served. Paths are those of the nodes."""

    target: str = DEMO  # folder, hub name, or demo
    draft: str = ""  # the same, or ngram, or none; empty: demo for a demo target, else ngram
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the weights in memory
    draft_dtype: Literal["auto", "float32", "bfloat16", "int8"] | None = None  # of the draft model; null: the same
    max_context: int | None = None  # positions of a sequence
    num_slots: int | None = None  # tokens that each KV cache holds
    max_batch_tokens: int | None = None  # rows of one step
    load_timeout_s: float = START_TIMEOUT_S  # that a process may take until it serves, whenever it starts

    def __post_init__(self) -> None:
        if not self.target.strip():
            raise ConfigError("target must name a model")
        if not 0 < self.load_timeout_s < math.inf:
            raise ConfigError(f"load_timeout_s must be more than 0, got {self.load_timeout_s:g}")
        check_counts(self, "max_context", "num_slots", "max_batch_tokens")

    @property
    def drafter(self) -> str:
        """The draft model, ngram or none."""
        return self.draft or (DEMO if self.target == DEMO else NGRAM)

    @property
    def has_draft_model(self) -> bool:
        return self.drafter not in (NGRAM, NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsConfig:
    """Defaults and bounds of requests."""

    mode: Mode = Mode.PIPELINED
    rule: Rule = Rule.COUPLED
    num_speculative_tokens: int | None = None  # K
    max_sessions: int = 64  # answered at once by each coordinator; more wait

    def __post_init__(self) -> None:
        check_k(self.num_speculative_tokens)
        check_counts(self, "max_sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorsConfig:
    count: int = 1
    cpus: float = 0.25  # CPUs of each, as Ray counts them
    resources: Mapping[str, float] = field(default_factory=dict)  # others that Ray knows by name
    host: str = ""  # interface to listen on; empty: the node's address
    port: int = 0  # of each; 0: a free one (two on one node cannot have the same)
    http_port: int | None = None  # of the live page; 0: a free one; null: none
    metrics_port: int = 0  # of /metrics; 0: a free one

    def __post_init__(self) -> None:
        check_counts(self, "count", most=MAX_COUNT)
        for name in ("port", "http_port", "metrics_port"):
            check_port_number(name, getattr(self, name))
        check_resources(self.cpus, 0, self.resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWorkersConfig:
    count: int = 1
    tensor_parallel_size: int = 1  # ranks of each
    cpus: float = 1  # of each rank
    gpus: float = 0  # of each rank; one rank alone may have a part of one
    resources: Mapping[str, float] = field(default_factory=dict)  # of each rank
    placement: Placement = "STRICT_PACK"  # of the ranks: on one node, where they share memory; others: over the network

    def __post_init__(self) -> None:
        check_counts(self, "count", "tensor_parallel_size", most=MAX_COUNT)
        check_resources(self.cpus, self.gpus, self.resources)
        if self.tensor_parallel_size > 1 and self.gpus not in (0, 1):
            raise ConfigError(f"gpus must be 0 or 1 where there are several ranks: each has its own; got {self.gpus:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWorkersConfig:
    count: int = 1
    cpus: float = 1  # of each
    gpus: float = 0  # of each; 0.25: four of them share one GPU
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_counts(self, "count", least=0, most=MAX_COUNT)
        check_resources(self.cpus, self.gpus, self.resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartsConfig:
    """How long what has ended waits before it starts again: twice as long each time."""

    first_delay_s: float = FIRST_DELAY_S
    max_delay_s: float = MAX_DELAY_S
    stable_after_s: float = STABLE_AFTER_S  # what lived this long waits the shortest time again

    def __post_init__(self) -> None:
        if not 0 < self.first_delay_s <= self.max_delay_s < math.inf:
            raise ConfigError("first_delay_s must be more than 0 and at most max_delay_s")
        if not 0 <= self.stable_after_s < math.inf:
            raise ConfigError(f"stable_after_s must be at least 0, got {self.stable_after_s:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A whole service on a cluster."""

    name: str = "specpipe"  # one service of a name in a Ray namespace
    ray: RayConfig = field(default_factory=RayConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    requests: RequestsConfig = field(default_factory=RequestsConfig)
    coordinators: CoordinatorsConfig = field(default_factory=CoordinatorsConfig)
    target_workers: TargetWorkersConfig = field(default_factory=TargetWorkersConfig)
    draft_workers: DraftWorkersConfig = field(default_factory=DraftWorkersConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)  # of what is named there
    tls: TlsConfig = field(default_factory=TlsConfig)  # files on every node
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    grace_s: float = 10.0  # how long what is told to end may finish
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", self.name):
            raise ConfigError(f"name must be of letters, digits, '-', '_' and '.', 63 at most, got {self.name!r}")
        if not 0 <= self.grace_s < math.inf:
            raise ConfigError(f"grace_s must be at least 0, got {self.grace_s:g}")
        if self.autoscale.draft_workers is not None and not self.is_drafting:
            raise ConfigError("autoscale.draft_workers: nothing drafts with a model of its own in this service")
        if self.telemetry.metrics_port is not None:
            raise ConfigError("telemetry.metrics_port: give coordinators.metrics_port; workers have free ports")

    def patient(self, timeout_s: float) -> ClusterConfig:
        """The same, and a process has at least `timeout_s` seconds until it serves: whoever waits so long means it."""
        load_timeout_s = max(timeout_s, self.models.load_timeout_s)
        return replace(self, models=replace(self.models, load_timeout_s=load_timeout_s))

    @property
    def num_draft_workers(self) -> int:
        """At the start."""
        return self.draft_workers.count if self.is_drafting else 0

    @property
    def is_drafting(self) -> bool:
        """Whether draft workers have something to do."""
        return self.models.has_draft_model and self.requests.mode is not Mode.OFF


def check_resources(cpus: float, gpus: float, others: Mapping[str, float]) -> None:
    """Raises ConfigError for what Ray could not give."""
    named = {f"resources.{name}": amount for name, amount in others.items()}
    for name, amount in {"cpus": cpus, "gpus": gpus, **named}.items():
        if not 0 <= amount <= MAX_AMOUNT:
            raise ConfigError(f"{name} must be from 0 to {MAX_AMOUNT:.0f}, got {amount:g}")
    if cpus == 0 and gpus == 0:
        raise ConfigError("cpus must be more than 0 where there are no gpus")
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"gpus must be a whole number or less than 1, got {gpus:g}")
    if reserved := {"CPU", "GPU"} & set(others):
        raise ConfigError(f"resources: {min(reserved)} is given as {min(reserved).lower()}s")

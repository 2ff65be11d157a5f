"""Which processes a local service is made of, with which flags and on which cores.

Owns: ServiceConfig and its translation into the flags of `specpipe coordinator|draft-worker|target-worker`. Pure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from specpipe.config import EngineConfig, ServerConfig, TelemetryConfig, check_counts, check_k, check_port_number
from specpipe.ports import LOOPBACK
from specpipe.types import Mode, Rule

COORDINATOR: Final = "coordinator"
DRAFT_WORKER: Final = "draft-worker"
TARGET_WORKER: Final = "target-worker"
TARGET_RANK: Final = "target-rank"  # of a target worker with several; started by its rank 0

START_TIMEOUT_S: Final = 1800.0  # until a process serves: a large model from a slow disk

NGRAM: Final = "ngram"
NONE: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """A whole service. What is None takes the default of the process concerned."""

    target: str  # folder or hub name of the target model
    draft: str = NONE  # folder or hub name of the draft model; "ngram": the target's own lookup; "none"
    tensor_parallel_size: int = 1  # ranks of each target worker
    draft_workers: int = 1
    target_workers: int = 1
    mode: Mode = Mode.PIPELINED  # default of requests; off starts no draft worker
    rule: Rule = Rule.COUPLED  # default of requests
    num_speculative_tokens: int | None = None
    dtype: str = "auto"
    draft_dtype: str | None = None  # of the draft model, if not the same
    device: str = "cpu"
    host: str = "127.0.0.1"  # where the coordinator listens; workers always listen on loopback
    port: int = 0  # 0: a free one
    max_context: int | None = None
    num_slots: int | None = None
    max_sessions: int = 64  # answered at once; more wait
    max_batch_tokens: int | None = None
    has_prefix_cache: bool = True  # of target and draft workers
    grace_s: float = 10.0  # how long SIGTERM lets answers finish
    is_pinned: bool = True  # each model process on a core of its own while there are enough
    log_level: str = "warning"
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)  # metrics_port: the coordinator's; the workers
    # have those that follow it, targets first (0: a free one each)
    http_port: int | None = None  # of the live page; 0: a free one
    is_http_port_preferred: bool = False  # if it is taken, a free one does as well

    def __post_init__(self) -> None:
        check_counts(
            self, "tensor_parallel_size", "draft_workers", "target_workers", "max_sessions", "max_batch_tokens"
        )
        check_k(self.num_speculative_tokens)
        check_port_number("http_port", self.http_port)
        ServerConfig(host=self.host, port=self.port, grace_s=self.grace_s)  # their checks are ours
        EngineConfig(
            model=self.target,
            dtype=self.dtype,
            device=self.device,
            max_context=self.max_context,
            num_slots=self.num_slots,
        )

    @property
    def num_draft_workers(self) -> int:
        return 0 if self.drafter != "model" else self.draft_workers

    @property
    def drafter(self) -> str:
        """What drafts by default: "model", "ngram" or "none"."""
        if self.mode is Mode.OFF:
            return NONE
        return self.draft if self.draft in (NGRAM, NONE) else "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process: `specpipe ROLE ARGUMENTS`, without what is only known at start (port, descriptors)."""

    role: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()  # variables besides ours
    start_timeout_s: float = START_TIMEOUT_S  # that it may take until it serves


def plan_workers(config: ServiceConfig, cores: Sequence[int]) -> list[ProcessSpec]:
    """Target workers first, then draft workers; cores go to them in this order until there are none left.

    With one core nothing is pinned: it would only tie the workers to the coordinator's.
    """
    free = list(cores) if config.is_pinned and len(cores) > 1 else []
    specs: list[ProcessSpec] = []
    for _ in range(config.target_workers):
        taken, free = free[: config.tensor_parallel_size], free[config.tensor_parallel_size :]
        size = ("--tensor-parallel-size", str(config.tensor_parallel_size))
        arguments = _engine_arguments(config, config.target, config.dtype) + size + _core_arguments(taken)
        arguments += _metrics_arguments(config.telemetry, 1 + len(specs))
        specs.append(ProcessSpec(role=TARGET_WORKER, arguments=arguments))
    for _ in range(config.num_draft_workers):
        taken, free = free[:1], free[1:]
        arguments = _engine_arguments(config, config.draft, config.draft_dtype or config.dtype) + _core_arguments(taken)
        arguments += _metrics_arguments(config.telemetry, 1 + len(specs))
        specs.append(ProcessSpec(role=DRAFT_WORKER, arguments=arguments))
    return specs


def plan_coordinator(config: ServiceConfig, targets: Sequence[str], drafts: Sequence[str]) -> ProcessSpec:
    """`targets` and `drafts` are the addresses at which the workers answer."""
    arguments = _flags(
        tokenizer=config.target,
        drafter=config.drafter,
        mode=config.mode.value,
        rule=config.rule.value,
        num_speculative_tokens=config.num_speculative_tokens,
        max_sessions=config.max_sessions,
        host=config.host,
        port=config.port,
        grace=config.grace_s,
        log_level=config.log_level,
        http_port=config.http_port,
    )
    if config.is_http_port_preferred:
        arguments += ("--http-port-preferred",)
    arguments += _metrics_arguments(config.telemetry, 0) + _trace_arguments(config.telemetry)
    for target in targets:
        arguments += ("--target", target)
    for draft in drafts:
        arguments += ("--draft", draft)
    return ProcessSpec(role=COORDINATOR, arguments=arguments)


def metrics_ports(config: ServiceConfig) -> list[tuple[str, int]]:
    """Host and port of each process's metrics, the coordinator's first; none where any free ports will do."""
    first = config.telemetry.metrics_port
    if not first:
        return []
    num_workers = config.target_workers + config.num_draft_workers
    return [(config.host, first), *((LOOPBACK, first + number) for number in range(1, 1 + num_workers))]


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _engine_arguments(config: ServiceConfig, model: str, dtype: str) -> tuple[str, ...]:
    flags = _flags(
        model=model,
        dtype=dtype,
        device=config.device,
        max_context=config.max_context,
        num_slots=config.num_slots,
        # NOTE: workers get room for all sessions of the service and for those still closing: the coordinator is what
        # makes requests wait.
        max_sessions=2 * config.max_sessions,
        max_batch_tokens=config.max_batch_tokens,
        grace=config.grace_s,
        log_level=config.log_level,
    )
    return flags if config.has_prefix_cache else (*flags, "--no-prefix-cache")


def _metrics_arguments(telemetry: TelemetryConfig, number: int) -> tuple[str, ...]:
    """`number`: of the process, the coordinator being 0."""
    first = telemetry.metrics_port
    return _flags(otlp_endpoint=telemetry.otlp_endpoint or None, metrics_port=first + number if first else first)


def _trace_arguments(telemetry: TelemetryConfig) -> tuple[str, ...]:
    """Of the coordinator, which asks workers for what it traces."""
    flags = _flags(trace_level=telemetry.trace_level, trace_sample=telemetry.trace_sample)
    return (*flags, "--trace-content") if telemetry.has_content else flags


def _core_arguments(cores: Sequence[int]) -> tuple[str, ...]:
    """The first for the process itself, the others for its ranks."""
    flags = ("--core", *("--rank-core",) * (len(cores) - 1))
    return tuple(part for flag, core in zip(flags, cores, strict=False) for part in (flag, str(core)))


def _flags(**values: object) -> tuple[str, ...]:
    """max_context=128 -> ("--max-context", "128"); None is left out."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in values.items() if value is not None]
    return tuple(part for pair in pairs for part in pair)

"""Which processes a cluster is made of, and what each is placed on.

Owns: from ClusterConfig to groups of bundles and the command lines of their processes. Pure.
What only the node knows is a word in braces, which the keeper there replaces: {host}, its address; {workers}, a folder
in which the files `target` and `draft` list the workers; {demo_target} and {demo_draft}, the folders of the demo pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from specpipe.cluster.config import DEMO, ClusterConfig, Placement
from specpipe.config import RANK_TOKEN_VARIABLE
from specpipe.launcher.plan import (
    COORDINATOR,
    DRAFT_WORKER,
    TARGET_WORKER,
    ProcessSpec,
    ServiceConfig,
    plan_coordinator,
    plan_workers,
)

HOST: Final = "{host}"
WORKERS: Final = "{workers}"
DEMO_TARGET: Final = "{demo_target}"
DEMO_DRAFT: Final = "{demo_draft}"
TARGETS_FILE: Final = "target"
DRAFTS_FILE: Final = "draft"
ROLES: Final = (TARGET_WORKER, DRAFT_WORKER, COORDINATOR)  # in the order of starting


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One worker or coordinator: bundles that Ray places together, and the process that runs in the first of them, or
    in each (then without what tells its ranks from one another)."""

    process: ProcessSpec
    bundles: tuple[Mapping[str, float], ...]  # Ray's names ("CPU", "GPU", ...) and amounts; one a rank
    placement: Placement = "STRICT_PACK"

    @property
    def role(self) -> str:
        return self.process.role

    @property
    def has_distant_ranks(self) -> bool:
        """Each bundle has a rank's process: they may be on several nodes. Else the first starts all of them."""
        return len(self.bundles) > 1 and self.placement != "STRICT_PACK"


def plan_group(config: ClusterConfig, role: str) -> GroupPlan:
    """What each worker or coordinator of a role is."""
    if role == COORDINATOR:
        return _plan_coordinator(config)
    return _plan_target(config) if role == TARGET_WORKER else _plan_draft(config)


def rank_process(process: ProcessSpec, rank: int, rendezvous: str, token: str) -> ProcessSpec:
    """One rank of several nodes. `rendezvous`: where rank 0 listens, HOST:PORT. `token`: the group's secret."""
    return replace(
        process,
        arguments=(*process.arguments, "--rank", str(rank), "--rendezvous", rendezvous),
        environment=(*process.environment, (RANK_TOKEN_VARIABLE, token)),
    )


def counts_at_start(config: ClusterConfig) -> dict[str, int]:
    return {
        TARGET_WORKER: config.target_workers.count,
        DRAFT_WORKER: config.num_draft_workers,
        COORDINATOR: config.coordinators.count,
    }


def counts_at_most(config: ClusterConfig) -> dict[str, int]:
    """What autoscaling may make of it."""
    drafts, targets = config.autoscale.draft_workers, config.autoscale.target_workers
    counts = counts_at_start(config)
    counts[TARGET_WORKER] = max(counts[TARGET_WORKER], targets.max if targets else 0)
    counts[DRAFT_WORKER] = max(counts[DRAFT_WORKER], drafts.max if drafts else 0)
    return counts


def _plan_target(config: ClusterConfig) -> GroupPlan:
    own = config.target_workers
    bundle = _bundle(own.cpus, own.gpus, own.resources)
    return GroupPlan(
        process=_worker(config, TARGET_WORKER, own.cpus, own.gpus),
        bundles=(bundle,) * own.tensor_parallel_size,
        placement=own.placement,
    )


def _plan_draft(config: ClusterConfig) -> GroupPlan:
    own = config.draft_workers
    return GroupPlan(
        process=_worker(config, DRAFT_WORKER, own.cpus, own.gpus),
        bundles=(_bundle(own.cpus, own.gpus, own.resources),),
    )


def _plan_coordinator(config: ClusterConfig) -> GroupPlan:
    own = config.coordinators
    service = replace(
        _service(config, "cpu"),
        host=own.host or HOST,
        port=own.port,
        http_port=own.http_port,
        telemetry=replace(config.telemetry, metrics_port=own.metrics_port),
    )
    drafts = (f"file:{WORKERS}/{DRAFTS_FILE}",) if service.num_draft_workers else ()
    spec = plan_coordinator(service, (f"file:{WORKERS}/{TARGETS_FILE}",), drafts)
    return GroupPlan(
        process=_timed(config, spec, (*spec.arguments, *_tls_arguments(config))),
        bundles=(_bundle(own.cpus, 0, own.resources),),
    )


def _worker(config: ClusterConfig, role: str, cpus: float, gpus: float) -> ProcessSpec:
    service = _service(config, "cuda" if gpus else "cpu")
    (spec,) = (spec for spec in plan_workers(service, cores=()) if spec.role == role)
    threads = ("--num-threads", str(int(cpus))) if cpus >= 2 and not gpus else ()
    return _timed(config, spec, (*spec.arguments, "--host", HOST, *threads, *_tls_arguments(config)))


def _timed(config: ClusterConfig, spec: ProcessSpec, arguments: tuple[str, ...]) -> ProcessSpec:
    return replace(spec, arguments=arguments, start_timeout_s=config.models.load_timeout_s)


def _service(config: ClusterConfig, device: str) -> ServiceConfig:
    """One worker of each kind, as the launcher of one machine would start them."""
    models = config.models
    return ServiceConfig(
        target=DEMO_TARGET if models.target == DEMO else models.target,
        draft=DEMO_DRAFT if models.drafter == DEMO else models.drafter,
        tensor_parallel_size=config.target_workers.tensor_parallel_size,
        mode=config.requests.mode,
        rule=config.requests.rule,
        num_speculative_tokens=config.requests.num_speculative_tokens,
        dtype=models.dtype,
        draft_dtype=models.draft_dtype,
        device=device,
        max_context=models.max_context,
        num_slots=models.num_slots,
        max_sessions=config.requests.max_sessions,
        max_batch_tokens=models.max_batch_tokens,
        grace_s=config.grace_s,
        is_pinned=False,
        log_level=config.log_level,
        telemetry=replace(config.telemetry, metrics_port=0),
    )


def _bundle(cpus: float, gpus: float, others: Mapping[str, float]) -> Mapping[str, float]:
    amounts = {"CPU": float(cpus), "GPU": float(gpus), **others}
    return {name: amount for name, amount in amounts.items() if amount}


def _tls_arguments(config: ClusterConfig) -> tuple[str, ...]:
    named = (("--tls-cert", config.tls.cert), ("--tls-key", config.tls.key), ("--tls-ca", config.tls.ca))
    return tuple(part for pair in named if pair[1] for part in pair)

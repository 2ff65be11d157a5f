"""`specpipe coordinator | draft-worker | target-worker`: one process of a service, started by hand or by the launcher.

Owns: from flags to the configuration of that process. The service itself is imported last: it may load torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NoReturn

import typer

from specpipe import demo
from specpipe.cli.failure import exit_code_of, say_error
from specpipe.cli.flags import (
    EngineFlags,
    ServerFlags,
    SpeculationFlags,
    TelemetryFlags,
    TlsFlags,
    TraceFlags,
    checked_address,
    checked_worker,
    named_as_flags,
    option,
    takes_flags,
    telemetry_config,
    tls_config,
)
from specpipe.cli.models import check_device, check_ranks_fit, check_tokenizer_folder, named
from specpipe.config import (
    MIN_RANK_TOKEN_LENGTH,
    RANK_TOKEN_VARIABLE,
    CoordinatorConfig,
    DraftWorkerConfig,
    EngineConfig,
    RendezvousConfig,
    ServerConfig,
    TargetWorkerConfig,
)
from specpipe.engine.folder import check_folder
from specpipe.errors import ConfigError, SpecpipeError
from specpipe.ports import EVERY_INTERFACE
from specpipe.process import cores_before_pinning, run_process
from specpipe.telemetry.logs import configure_logging
from specpipe.types import Mode, Rule

logger = logging.getLogger(__name__)

STDOUT: Final = 1
Drafter = Literal["model", "ngram", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorFlags:
    """Flags of `coordinator` alone; see CoordinatorConfig."""

    target: Annotated[
        list[str], option("Target worker; may be repeated. dns: all of a name.", metavar="[dns:]HOST:PORT|file:PATH")
    ] = field(default_factory=list)
    draft: Annotated[list[str], option("Draft worker; the same goes for it.", metavar="[dns:]HOST:PORT|file:PATH")] = (
        field(default_factory=list)
    )
    tokenizer: Annotated[str, option("Folder or hub name.  [the target model's name]", metavar="MODEL")] = ""
    drafter: Annotated[Drafter | None, option("What drafts.  [model if there are draft workers, else none]")] = None
    max_sessions: Annotated[int, option("Requests answered at once; more wait.  [256]")] = 256
    max_queue: Annotated[int, option("Requests waiting; more are refused.  [1024]")] = 1024
    served_model_name: Annotated[str, option("Name that clients use.  [the target's folder name]")] = ""
    http_port: Annotated[int | None, option("Serve the live page here; 0: a free port.")] = None
    http_port_preferred: Annotated[bool, typer.Option("--http-port-preferred", hidden=True)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFlags:
    model: Annotated[
        str | None, option("Draft model: folder or hub name.  [demo pair]", "--model", "--draft", metavar="MODEL")
    ] = None
    max_nodes: Annotated[int, option("Nodes of a session's draft tree.  [256]")] = 256
    max_depth: Annotated[int, option("Its depth.  [48]")] = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFlags:
    model: Annotated[
        str | None, option("Target model: folder or hub name.  [demo pair]", "--model", "--target", metavar="MODEL")
    ] = None
    tensor_parallel_size: Annotated[int, option("Ranks.  [1]")] = 1
    rank_core: Annotated[list[int], option("Core of the next rank after the first; may be repeated.")] = field(
        default_factory=list
    )
    rendezvous: Annotated[
        str | None, option("Ranks are on several hosts: rank 0 listens here, the others dial.", metavar="HOST:PORT")
    ] = None
    rank: Annotated[int | None, option("With it: which rank this process is; 0 serves.")] = None
    max_nodes: Annotated[int, option("Nodes held of a session's draft tree.  [256]")] = 256
    max_shared_slowdown: Annotated[float, option("A shared step's time over its plain time.  [1.25]")] = 1.25
    max_prefill_slowdown: Annotated[float, option("A step's time with prefill over without.  [2]")] = 2.0


@takes_flags(
    own=CoordinatorFlags,
    speculation=SpeculationFlags,
    server=ServerFlags,
    tls=TlsFlags,
    telemetry=TelemetryFlags,
    traces=TraceFlags,
)
def coordinator(
    *,
    own: CoordinatorFlags,
    speculation: SpeculationFlags,
    server: ServerFlags,
    tls: TlsFlags,
    telemetry: TelemetryFlags,
    traces: TraceFlags,
) -> int:
    """Answer GenerateService with the workers named. Loads no model."""
    configure_logging(server.log_level)
    if not own.target:
        raise ConfigError("name at least one target worker with --target HOST:PORT")
    check_tokenizer_folder(own.tokenizer)
    with named_as_flags(CoordinatorFlags, SpeculationFlags):
        config = CoordinatorConfig(
            server=server_config(
                server, tls, "coordinator ready at {address}: specpipe generate --connect HOST:PORT PROMPT"
            ),
            telemetry=telemetry_config(telemetry, traces),
            http_port=own.http_port,
            is_http_port_preferred=own.http_port_preferred,
            targets=tuple(checked_worker("--target", source) for source in own.target),
            drafts=tuple(checked_worker("--draft", source) for source in own.draft),
            tokenizer=own.tokenizer,
            drafter=own.drafter or ("model" if own.draft else "none"),
            mode=speculation.mode or Mode.PIPELINED,
            rule=speculation.rule or Rule.COUPLED,
            num_speculative_tokens=speculation.num_speculative_tokens,
            max_sessions=own.max_sessions,
            max_queue=own.max_queue,
            served_model_name=own.served_model_name,
        )
    if config.drafter == "none" and speculation.mode in (Mode.SYNC, Mode.PIPELINED) and server.parent_fd is None:
        logger.warning("--mode %s: nothing drafts without --draft or --drafter ngram", speculation.mode.value)

    async def main() -> int:
        from coordinator.service import serve

        return await serve(config)

    run_service(main, config.server)


@takes_flags(own=DraftFlags, engine=EngineFlags, server=ServerFlags, tls=TlsFlags, telemetry=TelemetryFlags)
def draft_worker(
    *, own: DraftFlags, engine: EngineFlags, server: ServerFlags, tls: TlsFlags, telemetry: TelemetryFlags
) -> int:
    """Draft for coordinators that connect."""
    configure_logging(server.log_level)
    with named_as_flags(DraftFlags):
        config = DraftWorkerConfig(
            server=server_config(
                server, tls, "draft worker ready at {address}: name it to a coordinator with --draft HOST:PORT"
            ),
            telemetry=telemetry_config(telemetry),
            engine=engine_config(named("--model", own.model, str(demo.draft_folder())), engine),
            max_nodes=own.max_nodes,
            max_depth=own.max_depth,
        )

    async def main() -> int:
        from draft_worker.service import serve

        return await serve(config)

    run_service(main, config.server, config.engine)


@takes_flags(own=TargetFlags, engine=EngineFlags, server=ServerFlags, tls=TlsFlags, telemetry=TelemetryFlags)
def target_worker(
    *, own: TargetFlags, engine: EngineFlags, server: ServerFlags, tls: TlsFlags, telemetry: TelemetryFlags
) -> int:
    """Verify and decode for coordinators that connect."""
    configure_logging(server.log_level)
    rendezvous = rendezvous_config(own)
    engine_configured = engine_config(named("--model", own.model, str(demo.target_folder())), engine)
    check_ranks_fit(engine_configured.model, own.tensor_parallel_size)
    check_cores("--rank-core", own.rank_core)
    with named_as_flags(TargetFlags, EngineFlags):
        config = TargetWorkerConfig(
            server=server_config(server, tls, target_ready_text(rendezvous)),
            telemetry=telemetry_config(telemetry),
            engine=engine_configured,
            tensor_parallel_size=own.tensor_parallel_size,
            rank_cores=tuple(own.rank_core),
            rendezvous=rendezvous,
            max_nodes=own.max_nodes,
            max_shared_slowdown=own.max_shared_slowdown,
            max_prefill_slowdown=own.max_prefill_slowdown,
        )

    async def main() -> int:
        from target_worker.service import serve

        return await serve(config)

    run_service(main, config.server, config.engine)


def target_ready_text(rendezvous: RendezvousConfig | None) -> str:
    if rendezvous is not None and rendezvous.rank > 0:
        return f"rank {rendezvous.rank} takes part in the group of {{address}}"
    return "target worker ready at {address}: name it to a coordinator with --target HOST:PORT"


def rendezvous_config(flags: TargetFlags) -> RendezvousConfig | None:
    """Raises ConfigError for what cannot be together."""
    if (flags.rendezvous is None) != (flags.rank is None):
        raise ConfigError("--rendezvous and --rank are given together, or neither: ranks of one host need none")
    if flags.rendezvous is None or flags.rank is None:
        return None
    size = flags.tensor_parallel_size
    if size < 2:
        raise ConfigError(f"--rendezvous is for several ranks: it needs --tensor-parallel-size 2 or more, got {size}")
    if not 0 <= flags.rank < size:
        raise ConfigError(f"--rank must be from 0 to {size - 1} with --tensor-parallel-size {size}, got {flags.rank}")
    if flags.rank_core:
        raise ConfigError("--rank-core is for ranks of one host: with --rendezvous each rank has its own --core")
    host = checked_address("--rendezvous", flags.rendezvous).rpartition(":")[0]
    if flags.rank > 0 and host in EVERY_INTERFACE:
        raise ConfigError(f"--rendezvous {flags.rendezvous}: rank {flags.rank} dials rank 0, so name its host")
    token = os.environ.get(RANK_TOKEN_VARIABLE, "")
    if len(token) < MIN_RANK_TOKEN_LENGTH:
        raise ConfigError(
            f"{RANK_TOKEN_VARIABLE} must hold a secret of {MIN_RANK_TOKEN_LENGTH} characters or more, the same for all "
            "ranks of this target worker"
        )
    return RendezvousConfig(rank=flags.rank, address=flags.rendezvous, token=token)


def run_service(
    main: Callable[[], Awaitable[int]], server: ServerConfig, engine: EngineConfig | None = None
) -> NoReturn:
    """The whole life of the process, which ends here with its exit code, after one sentence if it failed.

    Nothing is left to do then, and the interpreter would take seconds to take torch apart.
    """

    async def say_why() -> int:
        try:
            return await main()
        except SpecpipeError as error:
            say_error(str(error))
            return exit_code_of(error)

    core, num_threads = (engine.core, engine.num_threads) if engine else (None, 1)
    code = run_process(say_why, server, core=core, num_threads=num_threads)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def server_config(flags: ServerFlags, tls: TlsFlags, ready_text: str) -> ServerConfig:
    """Without a parent that waits for it, the address goes to stdout: alone for a script, with a text for people."""
    is_read_by_people = flags.ready_fd is None and os.isatty(STDOUT)
    with named_as_flags(ServerFlags):
        return ServerConfig(
            host=flags.host,
            port=flags.port,
            health_port=flags.health_port,
            tls=tls_config(tls),
            grace_s=flags.grace,
            ready_fd=os.dup(STDOUT) if flags.ready_fd is None else flags.ready_fd,
            ready_text=ready_text if is_read_by_people else "{address}",
            parent_fd=flags.parent_fd,
        )


def engine_config(model: str, flags: EngineFlags) -> EngineConfig:
    """Checks the folder too, before torch is loaded. Raises ConfigError or UnsupportedModelError."""
    with named_as_flags(EngineFlags):
        config = EngineConfig(
            model=model,
            dtype=flags.dtype,
            device=flags.device,
            max_context=flags.max_context,
            num_slots=flags.num_slots,
            max_sessions=flags.max_sessions,
            max_batch_tokens=flags.max_batch_tokens,
            has_prefix_cache=not flags.no_prefix_cache,
            num_threads=flags.num_threads,
            core=flags.core,
        )
    check_cores("--core", [] if flags.core is None else [flags.core])
    check_device(flags.device)
    check_folder(model)
    return config


def check_cores(flag: str, cores: Sequence[int]) -> None:
    """Raises ConfigError for a core that this process may not use."""
    allowed = cores_before_pinning()
    for core in cores:
        if core not in allowed:
            raise ConfigError(f"{flag} {core} is not one of this process's cores: {sorted(allowed)}")

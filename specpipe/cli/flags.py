"""Groups of flags as dataclasses, and the decorator that turns their fields into parameters of a command.

Owns: names, help and defaults of flags that several commands share; their texts become values here, before a command
begins (`specpipe.cli.values`). Must not know: what a command does with them.
A flag's default is None where "not given" has to be told from "given": the service's own default then applies.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from specpipe.cli.values import as_text, is_list, kind_of, read_value, scalar_of
from specpipe.config import TelemetryConfig, TlsConfig, TraceLevel
from specpipe.errors import ConfigError
from specpipe.ports import is_address
from specpipe.telemetry.logs import LogLevel
from specpipe.types import Mode, Rule

Dtype = Literal["auto", "float32", "bfloat16"]
DraftDtype = Literal["auto", "float32", "bfloat16", "int8"]


def option(help_text: str, *names: str, metavar: str = "TEXT") -> Any:
    """`metavar` is what the list of options shows as the value of a text; other values have theirs by their kind."""
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """What an answer is drawn from and where it ends."""

    max_tokens: Annotated[int | None, option("Tokens of an answer at most, cut at the context.  [256]")] = None
    temperature: Annotated[float | None, option("0: always the most likely token.  [1.0]")] = None
    top_p: Annotated[float | None, option("Only the smallest set of tokens with this probability.  [1.0: off]")] = None
    top_k: Annotated[int | None, option("Only this many most likely tokens.  [0: off]")] = None
    min_p: Annotated[float | None, option("Only tokens this probable compared with the best.  [0: off]")] = None
    seed: Annotated[int | None, option("Same seed, same answer (under the coupled rule).  [drawn and reported]")] = None
    stop: Annotated[list[str], option("End before this text; may be repeated.")] = field(default_factory=list)
    stop_token_id: Annotated[list[int], option("End at this token; may be repeated.")] = field(default_factory=list)
    ignore_eos: Annotated[bool, option("Go on after the model's end token.", "--ignore-eos")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFlags:
    """How an answer is speculated for."""

    mode: Annotated[Mode | None, option("How to speculate.  [pipelined]")] = None
    rule: Annotated[Rule | None, option("How a drafted token is accepted.  [coupled]")] = None
    num_speculative_tokens: Annotated[
        int | None, option("Longest path one round may accept.  [4 in sync, by goodput in pipelined]")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFlags:
    """What a service on this machine is made of."""

    target: Annotated[str | None, option("Target model: folder or hub name.  [demo pair]", metavar="MODEL")] = None
    draft: Annotated[
        str | None,
        option(
            "Draft model: folder, hub name, ngram or none.  "
            "[the demo draft if it has the target's tokenizer, else ngram]",
            metavar="MODEL|ngram|none",
        ),
    ] = None
    tensor_parallel_size: Annotated[int | None, option("Ranks of each target worker.  [1]")] = None
    draft_workers: Annotated[int | None, option("Draft workers.  [1]")] = None
    target_workers: Annotated[int | None, option("Target workers.  [1]")] = None
    dtype: Annotated[
        Dtype | None,
        option("Of the weights in memory; auto: bfloat16 if the folder's are, else float32, of float16 too.  [auto]"),
    ] = None
    draft_dtype: Annotated[
        DraftDtype | None,
        option("The same of the draft; auto: also int8 where that is quicker and they are bfloat16.  [as --dtype]"),
    ] = None
    device: Annotated[str | None, option("Where the model runs.  [cpu]", metavar="cpu|cuda")] = None
    no_pin: Annotated[bool, option("Do not pin workers to cores.", "--no-pin")] = False

    def given(self) -> list[str]:
        """The flags that were given, as they are written."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return [flag_of(name) for name in changed]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """A model and the room it gets; see EngineConfig."""

    dtype: Annotated[
        DraftDtype,
        option(
            "Of the weights in memory; auto: bfloat16 if the folder's are (of a draft int8 where that is quicker), "
            "else float32, of float16 too; int8: of drafts only.  [auto]"
        ),
    ] = "auto"
    device: Annotated[str, option("Where the model runs.  [cpu]", metavar="cpu|cuda")] = "cpu"
    max_context: Annotated[int | None, option("Positions of a sequence at most.  [the model's limit]")] = None
    num_slots: Annotated[
        int | None,
        option("Tokens the KV cache holds.  [16 contexts of at most 4096, or what memory allows]"),
    ] = None
    max_sessions: Annotated[int, option("Sessions open at once.  [64]")] = 64
    max_batch_tokens: Annotated[int, option("Rows of one step at most.  [256]")] = 256
    no_prefix_cache: Annotated[bool, option("Compute every prompt anew.", "--no-prefix-cache")] = False
    num_threads: Annotated[int, option("Compute threads.  [1]")] = 1
    core: Annotated[int | None, option("CPU core to stay on.  [any]")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Where a process listens and how it ends; see ServerConfig."""

    host: Annotated[str, option("Interface to listen on.  [127.0.0.1]", metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, option("Port; 0: a free one.  [0]")] = 0
    health_port: Annotated[int | None, option("Answer health here too, alone and without TLS; 0: a free port.")] = None
    grace: Annotated[float, option("Seconds that SIGTERM lets answers finish.  [10]")] = 10.0
    log_level: Annotated[LogLevel, option("What is logged to stderr.  [info]")] = "info"
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None
    parent_fd: Annotated[int | None, typer.Option(hidden=True)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFlags:
    """With which certificates a process speaks TLS; see TlsConfig. Without any it does not."""

    tls_cert: Annotated[str, option("Certificate to show, in PEM; read again when renewed.", metavar="FILE")] = ""
    tls_key: Annotated[str, option("Its private key.", metavar="FILE")] = ""
    tls_ca: Annotated[str, option("CA by which the other side is checked.", metavar="FILE")] = ""


def tls_config(flags: TlsFlags) -> TlsConfig:
    """Raises ConfigError."""
    if bool(flags.tls_cert) != bool(flags.tls_key):
        raise ConfigError("--tls-cert and --tls-key are given together or not at all")
    return TlsConfig(cert=flags.tls_cert, key=flags.tls_key, ca=flags.tls_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryFlags:
    """What a process says about itself, and to whom; see TelemetryConfig."""

    otlp_endpoint: Annotated[
        str | None,
        option("Send metrics, and coordinators traces, to this OTLP/gRPC receiver.", metavar="HOST:PORT"),
    ] = None
    metrics_port: Annotated[int | None, option("Serve /metrics to Prometheus here; 0: a free port.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """Which requests a coordinator traces, and what it keeps of them; see TelemetryConfig. Workers do as it asks."""

    trace_level: Annotated[TraceLevel, option("What is kept of a traced request.  [round]")] = "round"
    trace_sample: Annotated[
        float | None,
        option("Share of requests traced if the caller has not decided.  [1 with --otlp-endpoint, else 0]"),
    ] = None
    trace_content: Annotated[bool, option("Prompts and answers are part of traces.", "--trace-content")] = False


def telemetry_config(flags: TelemetryFlags, traces: TraceFlags | None = None) -> TelemetryConfig:
    """`traces`: of a coordinator. Raises ConfigError."""
    traces = traces or TraceFlags()
    if flags.otlp_endpoint is not None:
        checked_address("--otlp-endpoint", flags.otlp_endpoint)
    with named_as_flags(TelemetryFlags, TraceFlags):
        return TelemetryConfig(
            otlp_endpoint=flags.otlp_endpoint or "",
            trace_level=traces.trace_level,
            trace_sample=traces.trace_sample,
            has_content=traces.trace_content,
            metrics_port=flags.metrics_port,
        )


@contextmanager
def named_as_flags(*groups: type[Any]) -> Iterator[None]:
    """A ConfigError about a field names the flag of these groups that has set it.

    Fields have their flag's name, and where it is an amount perhaps a unit behind it (grace_s: --grace).
    """
    try:
        yield
    except ConfigError as error:
        field_name, _, reason = str(error).partition(" ")
        names = {f.name for group in groups for f in fields(group)} & {field_name, field_name.removesuffix("_s")}
        if not names:
            raise
        raise ConfigError(f"{flag_of(names.pop())} {reason}") from None


def checked_worker(flag: str, source: str) -> str:
    """Raises ConfigError unless it is HOST:PORT, dns:HOST:PORT or file:PATH."""
    if source.startswith("file:"):
        if not source.removeprefix("file:"):
            raise ConfigError(f"{flag} file: names no file")
        return source
    checked_address(flag, source.removeprefix("dns:"), form="[dns:]HOST:PORT or file:PATH", given=source)
    return source


def checked_address(flag: str, address: str, *, form: str = "HOST:PORT", given: str | None = None) -> str:
    """Raises ConfigError, which names the form wanted and what was given, unless the address is HOST:PORT."""
    if not is_address(address):
        raise ConfigError(f"{flag} needs {form}, got {(given or address)!r}")
    return address


def takes_flags(**groups: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Let typer see each field of each group as a parameter; the command receives the groups, filled, by keyword.

    Parameters of the command that are not groups stay as they are and come first.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in groups]
        parameters = own + [p for group in groups.values() for p in _parameters_of(group)]

        def run(**texts: Any) -> int:
            filled = {name: _filled(group, texts) for name, group in groups.items()}
            return command(**{p.name: texts[p.name] for p in own}, **filled)

        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _filled(group: type[Any], texts: dict[str, Any]) -> Any:
    """The group with what was given; the rest has its defaults. Raises ConfigError for a text that does not fit."""
    hints = get_type_hints(group)
    given = {f.name: texts[f.name] for f in fields(group) if texts[f.name] not in (None, [], ())}
    return group(**{name: _value(name, hints[name], text) for name, text in given.items()})


def _value(name: str, annotation: Any, text: Any) -> Any:
    kind, flag = kind_of(annotation), flag_of(name)
    if kind is None:
        return list(text) if is_list(annotation) else text
    return [read_value(flag, kind, part) for part in text] if is_list(annotation) else read_value(flag, kind, text)


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    """For typer: switches are booleans, everything else is a text or a list of texts."""
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(f.name, *get_args(hints[f.name])) for f in fields(group)]


def _parameter(name: str, annotation: Any, declared: Any) -> inspect.Parameter:
    declared = copy.copy(declared)
    kind = kind_of(annotation)
    is_switch = scalar_of(annotation) is bool
    shown = bool if is_switch else as_text(annotation)
    default: Any = False if is_switch else [] if is_list(annotation) else None
    declared.metavar = None if is_switch else kind.metavar if kind else declared.metavar
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[shown, declared], default=default
    )


def flag_of(name: str) -> str:
    """max_tokens -> --max-tokens."""
    return f"--{name.replace('_', '-')}"

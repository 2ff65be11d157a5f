"""The processes of three pods, started here with the pods' own arguments: probes, certificates, metrics, an answer.

What a cluster would put around them is put in: addresses of this machine, certificates and models where volumes are.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from manifests import Object, flags, name_of, probes_of, with_components, workload
from running import running_part
from scraping import scrape
from tiny_models import TinyPair

from specpipe.client import GenerateRequest, answer_once
from specpipe.errors import WorkerUnavailableError

PORT_FLAGS: Final = ("--port", "--health-port", "--metrics-port")

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A workload and the one process that stands for its pods."""

    workload: Object
    ports: dict[str, int]  # here, by flag

    def arguments(self, authority: Authority, **others: str) -> list[str]:
        """Those of the manifest, with what is different here."""
        role = name_of(self.workload)
        tls = authority.config(role)
        here = {"--host": "127.0.0.1", "--tls-cert": tls.cert, "--tls-key": tls.key, "--tls-ca": tls.ca}
        here |= {flag: str(port) for flag, port in self.ports.items()} | {
            f"--{name}": other for name, other in others.items()
        }
        assert set(here) - set(flags(self.workload)) <= {"--model", "--tokenizer"}, "the rest is in the manifest"
        return [role, *(f"{flag}={value}" for flag, value in (flags(self.workload) | here).items())]

    def is_well(self, probe: Object) -> bool:
        """As the kubelet asks: no TLS, this service name."""
        assert probe["grpc"]["port"] == int(flags(self.workload)["--health-port"])
        request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['--health-port']}") as channel:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPods:
    pods: tuple[Pod, ...]
    address: str  # of the coordinator
    authority: Authority


def create_pods(objects: tuple[Object, ...]) -> tuple[Pod, Pod, Pod]:
    """Target worker, draft worker, coordinator; each with ports that are free now."""
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(3 * len(PORT_FLAGS))]
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        ports = iter([int(holder.getsockname()[1]) for holder in holders])

    def create(role: str) -> Pod:
        return Pod(workload=workload(objects, role), ports={flag: next(ports) for flag in PORT_FLAGS})

    return create("target-worker"), create("draft-worker"), create("coordinator")


@pytest.fixture(scope="module")
def running(tiny_pair: TinyPair, log_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPods]:
    folder = tmp_path_factory.mktemp("pods")
    authority = Authority.create(folder / "authority")
    for role in ("target-worker", "draft-worker"):
        authority.issue(role, role)
    authority.issue("coordinator", "coordinator", "127.0.0.1")
    authority.issue("client", "client")
    target, draft, coordinator = create_pods(with_components(folder, "tls"))
    found = {"target": f"dns:localhost:{target.ports['--port']}", "draft": f"dns:localhost:{draft.ports['--port']}"}
    parts = (
        target.arguments(authority, model=str(tiny_pair.target)),
        draft.arguments(authority, model=str(tiny_pair.draft)),
        coordinator.arguments(authority, tokenizer=str(tiny_pair.target), **found),
    )
    with ExitStack() as stack:
        for part in parts:
            line = stack.enter_context(running_part(log_folder / f"pod_{part[0]}.log", *part))
        yield RunningPods(pods=(target, draft, coordinator), address=line.split()[0], authority=authority)


def test_every_probe_is_answered_on_its_port(running: RunningPods) -> None:
    for pod in running.pods:
        for name, probe in probes_of(pod.workload):
            assert pod.is_well(probe), (name_of(pod.workload), name)


def test_a_client_with_a_certificate_is_answered_and_draft_and_target_took_part(running: RunningPods) -> None:
    request = GenerateRequest(prompt="Once upon a time", max_tokens=24, temperature=0.0, ignore_eos=True)
    answer = answer_once(running.address, request, tls=running.authority.config("client"))
    assert len(answer.token_ids) == 24
    target, draft, _ = (scrape(f"127.0.0.1:{pod.ports['--metrics-port']}") for pod in running.pods)
    assert target.sum("specpipe_step_duration_seconds_count", kind="target") > 0
    assert draft.sum("specpipe_step_duration_seconds_count", kind="draft") > 0


def test_nobody_reaches_coordinator_or_workers_without_a_certificate(running: RunningPods) -> None:
    for pod in running.pods:
        with pytest.raises(WorkerUnavailableError, match="it may want TLS, or a certificate from who calls it"):
            answer_once(f"127.0.0.1:{pod.ports['--port']}", GenerateRequest(prompt="Once"))

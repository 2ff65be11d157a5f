"""Real processes: they say when they serve, drain on SIGTERM, end with their parent, and fail loudly."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fake_step_loop import Reader, an_open, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from high_descriptors import many_descriptors, moved_high

from specpipe.errors import ErrorCode, WorkerUnavailableError
from specpipe.server import create_channel
from specpipe.types import Close
from specpipe.worker_client import WorkerLink

SERVING = health_pb2.HealthCheckResponse.SERVING
SCRIPT = Path(__file__).with_name("process_under_test.py")


class Child:
    """A process under test; `address` is read from its ready pipe."""

    def __init__(self, process, ready_fd):
        self.process = process
        self.pid = process.pid
        self._ready_fd = ready_fd

    @property
    def address(self):
        return os.read(self._ready_fd, 100).decode().strip()

    def ended(self, timeout_s=20):
        """Exit code and what was written to stderr."""
        _, text = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text


@contextmanager
def child(work, *options, parent_pipe=False, is_high=False):
    ready_read, ready_write = os.pipe()
    pass_fds, fds = [ready_write], [f"ready_fd={ready_write}"]
    parent_write = None
    if parent_pipe:
        parent_read, parent_write = os.pipe()
        if is_high:
            parent_read = moved_high(parent_read)
        pass_fds.append(parent_read)
        fds.append(f"parent_fd={parent_read}")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), work, *fds, *options],
        pass_fds=pass_fds,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for fd in pass_fds:
        os.close(fd)
    started = Child(process, ready_read)
    started.parent_write = parent_write
    try:
        yield started
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        for fd in (ready_read, started.parent_write):
            if fd is not None:
                os.close(fd)


async def test_sigterm_lets_a_session_end_then_exits_0():
    with child("serve", "grace_s=20") as worker:
        address = worker.address
        async with WorkerLink.connect(address, "target", 9) as link, Reader(link) as reader:
            link.send(an_open(1))
            await until(lambda: reader.all("commits"))
            worker.process.send_signal(signal.SIGTERM)
            await until_not_serving(address)
            link.send(an_open(2))
            await until(lambda: reader.all("failures"))
            assert [(failed.session, failed.code) for failed in reader.all("failures")] == [(2, ErrorCode.UNAVAILABLE)]
            assert reader.error is None
            link.send(Close(session=1))
            await until(lambda: reader.error)
            assert [closed.session for closed in reader.all("closed")] == [2, 1]
        code, text = await asyncio.to_thread(worker.ended)
        assert code == 0, text
        assert "Traceback" not in text


async def until_not_serving(address):
    async with create_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while (await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status == SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_session_longer_than_the_grace_is_cut_and_the_exit_is_0():
    with child("serve", "grace_s=0.2") as worker:
        async with WorkerLink.connect(worker.address, "target", 9) as link, Reader(link) as reader:
            link.send(an_open(1))
            await until(lambda: reader.all("commits"))
            worker.process.send_signal(signal.SIGTERM)
            await until(lambda: reader.error)
        assert (await asyncio.to_thread(worker.ended))[0] == 0


async def test_a_second_sigterm_ends_the_drain():
    with child("serve", "grace_s=60") as worker:
        address = worker.address
        async with WorkerLink.connect(address, "target", 9) as link, Reader(link) as reader:
            link.send(an_open(1))
            await until(lambda: reader.all("commits"))
            worker.process.send_signal(signal.SIGTERM)
            await until_not_serving(address)
            worker.process.send_signal(signal.SIGTERM)
            await until(lambda: reader.error)
        assert (await asyncio.to_thread(worker.ended))[0] == 0


def test_sigint_alone_exits_130():
    with child("serve") as worker:
        assert worker.address
        worker.process.send_signal(signal.SIGINT)
        assert worker.ended()[0] == 130


def test_a_child_leaves_sigint_to_its_parent():
    with child("serve", parent_pipe=True) as worker:
        assert worker.address
        worker.process.send_signal(signal.SIGINT)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.ended()[0] == 0


def test_sigterm_while_loading_exits_0_at_once():
    with child("load") as worker:
        assert worker.process.stdout.readline() == "loading\n"
        worker.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        code, _ = worker.ended()
        assert code == 0
        assert time.monotonic() - started < 5


def test_a_closed_pipe_to_the_parent_ends_the_child():
    with child("serve", parent_pipe=True) as worker:
        assert worker.address
        os.close(worker.parent_write)
        worker.parent_write = None
        started = time.monotonic()
        worker.ended()
        assert time.monotonic() - started < 5


def test_the_pipe_to_the_parent_may_have_any_number():
    with many_descriptors(), child("serve", parent_pipe=True, is_high=True) as worker:
        assert worker.address
        os.close(worker.parent_write)
        worker.parent_write = None
        worker.ended()


def test_a_blocked_child_ends_too():
    with child("blocked", parent_pipe=True) as worker:
        assert worker.address
        os.close(worker.parent_write)
        worker.parent_write = None
        started = time.monotonic()
        worker.ended()
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("is_stopped", [False, True])
def test_sigkill_of_the_parent_ends_the_child_within_5_s(is_stopped):
    with child("parent") as parent:
        assert parent.address
        grandchild = psutil.Process(int(parent.process.stdout.readline()))
        if is_stopped:
            grandchild.suspend()
        parent.process.kill()
        _, alive = psutil.wait_procs([grandchild], timeout=5)
        assert alive == []


async def test_an_error_in_a_step_is_logged_once_and_exits_1():
    with child("broken") as worker:
        async with WorkerLink.connect(worker.address, "target", 9) as link, Reader(link) as reader:
            link.send(an_open(1))
            await until(lambda: reader.error)
        code, text = await asyncio.to_thread(worker.ended)
        assert code == 1
        assert text.count("ValueError: a bug in a step") == 1
        assert text.count("Traceback") == 1


async def test_what_was_loaded_is_not_looked_through_for_unused_cycles():
    with child("count") as worker:
        async with WorkerLink.connect(worker.address, "target", 9) as link, Reader(link) as reader:
            link.send(an_open(1))
            await until(lambda: reader.error)
        _, text = await asyncio.to_thread(worker.ended)
    spared, looked_at = map(int, re.search(r"spared (\d+), looked at (\d+)", text).groups())
    assert spared > 5 * looked_at


async def test_a_step_that_never_ends_does_not_keep_the_process():
    with child("stuck", "grace_s=0.1") as worker:
        async with WorkerLink.connect(worker.address, "target", 9) as link, Reader(link) as reader:
            link.send(an_open(1))
            await until(lambda: reader.all("commits"))
            worker.process.send_signal(signal.SIGTERM)
            await until(lambda: reader.error)
        code, text = await asyncio.to_thread(worker.ended)
        assert code == 0, text
        assert "leaving while a step still runs" in text


async def test_a_tokenizer_that_never_ends_does_not_keep_the_process():
    with child("tokenizer") as coordinator:
        code, text = await asyncio.to_thread(coordinator.ended)
    assert code == 0, text
    assert "leaving while the tokenizer still runs" in text


@pytest.mark.parametrize(
    ("work", "code", "sentence"),
    [
        ("missing-weights", 2, "ERROR no weights in the folder"),
        ("unsupported", 1, "ERROR recurrent state cannot be rolled back"),
    ],
)
def test_what_cannot_load_is_one_sentence(work, code, sentence):
    with child(work) as worker:
        ended, text = worker.ended()
        assert ended == code
        assert sentence in text.splitlines()
        assert "Traceback" not in text


def test_a_port_in_use_is_one_sentence_before_anything_loads():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with child("load", f"port={port}") as worker:
            code, text = worker.ended()
            assert code == 2
            assert f"ERROR port {port} on 127.0.0.1 is already in use" in text.splitlines()


def test_pinning_and_thread_counts():
    core = min(os.sched_getaffinity(0))
    with child("serve", f"core={core}", "num_threads=1") as worker:
        assert worker.address
        process = psutil.Process(worker.pid)
        assert process.cpu_affinity() == [core]


def test_a_core_that_is_not_there_is_refused():
    with child("serve", "core=4095") as worker:
        code, text = worker.ended()
        assert code == 2
        assert "core 4095 is not one of this process's cores" in text


async def test_a_killed_process_ends_its_links():
    with child("serve") as worker:
        async with WorkerLink.connect(worker.address, "target", 9) as link:
            worker.process.kill()
            with pytest.raises(WorkerUnavailableError, match="gone"):
                async for _ in link:
                    pass

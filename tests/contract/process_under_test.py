"""A worker process without a model, started by test_process.py: `process_under_test.py WORK [key=value...]`."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time

from fake_step_loop import HELLO, FakeStepLoop

from specpipe.config import ServerConfig
from specpipe.errors import ConfigError, UnsupportedModelError
from specpipe.process import run_process
from specpipe.worker_service import serve_worker


class CountingStepLoop(FakeStepLoop):
    """Fails with the numbers of objects that a look for unused cycles spares, and that it looks at."""

    def run_once(self):
        if self.sessions:
            raise ValueError(f"spared {gc.get_freeze_count()}, looked at {len(gc.get_objects())}")


class BrokenStepLoop(FakeStepLoop):
    def run_once(self):
        if self.sessions:
            raise ValueError("a bug in a step")


class StuckStepLoop(FakeStepLoop):
    def run_once(self):
        if self.sessions:
            time.sleep(60)


def create(work, send):
    if work == "missing-weights":
        raise ConfigError("no weights in the folder")
    if work == "unsupported":
        raise UnsupportedModelError("recurrent state cannot be rolled back")
    if work == "load":
        sys.stdout.write("loading\n")
        sys.stdout.flush()
        time.sleep(60)
    loops = {"broken": BrokenStepLoop, "stuck": StuckStepLoop, "count": CountingStepLoop}
    return HELLO, loops.get(work, FakeStepLoop)(send)


def start_child(fds):
    """Run a child of this process, with the read end of a pipe that this process holds, and live until killed."""
    parent_read, _parent_write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, __file__, "serve", f"ready_fd={fds[0]}", f"parent_fd={parent_read}"],
        pass_fds=(*fds, parent_read),
    )
    os.close(parent_read)
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    child.wait()


def stubborn_main(config):
    """Hold the event loop for ever once the process serves."""

    async def main():
        from specpipe.process import lifecycle

        async with lifecycle(config) as life:
            life.announce("127.0.0.1:1")
            time.sleep(60)  # noqa: ASYNC251 - holding the event loop is the point
        return 0

    return main


def tokenizing_main():
    """Begin to tokenize for ever, and end."""

    async def main():
        from coordinator.tokenization import TokenizerThread

        has_begun = threading.Event()
        thread = TokenizerThread()
        job = asyncio.ensure_future(thread.run(lambda: (has_begun.set(), time.sleep(60))))
        await asyncio.to_thread(has_begun.wait)
        job.cancel()
        thread.close()
        return 0

    return main


def main(work, *options):
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    values = dict(option.split("=") for option in options)
    if work == "parent":
        return start_child([int(values["ready_fd"])])
    extra = {name: int(values.pop(name)) for name in ("core", "num_threads") if name in values}
    config = ServerConfig(**{name: float(value) if name == "grace_s" else int(value) for name, value in values.items()})
    if work == "tokenizer":
        return run_process(tokenizing_main(), config)
    if work == "blocked":
        return run_process(stubborn_main(config), config)
    return run_process(lambda: serve_worker("target", config, lambda send: create(work, send)), config, **extra)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

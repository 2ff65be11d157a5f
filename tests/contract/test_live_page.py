"""The live page's server over real HTTP: what each path answers, what is refused, what is left behind."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from coordinator_cluster import DEMO, Cluster, Worker, cluster, draft_model, target_model
from http_calls import Events, asking, client, events, message_of
from waiting import wait_until

import coordinator.web
from coordinator.service import App
from coordinator.web.app import MAX_BODY_BYTES
from specpipe.client import GenerateRequest
from specpipe.config import CoordinatorConfig, ServerConfig
from specpipe.errors import ConfigError, SpecpipeError
from specpipe.server import create_server
from specpipe.types import Mode

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def add(left, right):\n"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "seed": 3}
SHORT = {"prompt": PROMPT, "max_tokens": 24, "seed": 5}
ASSETS = Path(coordinator.web.__file__).parent / "assets"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Cluster]:
    async with cluster(http_port=0) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(service: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with client(service.app.http_address) as opened:
        yield opened


# The page


async def test_the_root_leads_to_the_page(web: httpx2.AsyncClient) -> None:
    answer = await web.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui")


async def test_the_page_and_all_that_it_loads_come_from_here(web: httpx2.AsyncClient) -> None:
    page = (await web.get("/ui")).text
    urls = set(re.findall(r'"(/ui/assets/[^"]+)"', page))
    assert len(urls) >= 7
    for url in urls:
        asset = await web.get(url)
        assert asset.status_code == 200, url
        assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert "http" not in page.replace("http-equiv", "")


async def test_every_module_imports_what_is_there() -> None:
    """Of ours by a relative path, of the libraries by a name of the import map."""
    named = set(re.findall(r'"([^"]+)": "/ui/assets', (ASSETS / "index.html").read_text()))
    for module in [*ASSETS.glob("*.js"), *(ASSETS / "vendor").glob("*.mjs")]:
        for name in re.findall(r'(?:from|import) ?"([@./a-z-]+)"', module.read_text()):
            assert name in named or (module.parent / name).is_file(), f"{module.name} imports {name}"


async def test_a_file_of_another_version_is_not_given(web: httpx2.AsyncClient) -> None:
    for path in ("/ui/assets/0123456789abcdef/main.js", "/ui/assets/x/../../app.py", "/ui/nothing"):
        answer = await web.get(path)
        assert answer.status_code == 404
        assert message_of(answer).startswith("nothing is at /")


async def test_every_answer_says_what_a_browser_may_do_with_it(web: httpx2.AsyncClient) -> None:
    for path in ("/ui", "/healthz", "/ui/api/state", "/nothing"):
        headers = (await web.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


# State


async def test_the_state_names_the_model_and_every_worker(service: Cluster, web: httpx2.AsyncClient) -> None:
    state = (await web.get("/ui/api/state")).json()
    assert state["model"] == {"name": "table-1", "vocab_size": 4096, "max_context": 512}
    assert (state["is_ready"], state["is_stopping"]) == (True, False)
    assert state["defaults"]["mode"] == "pipelined"
    told = {(worker["kind"], worker["address"]): worker for worker in state["workers"]}
    assert told.keys() == {(worker.kind, worker.address) for worker in service.workers}
    target = told["target", service.targets[0].address]
    assert (target["state"], target["has_room"], target["sessions"]) == ("connected", True, 0)
    assert 0 < target["free_slots"] <= target["num_slots"] == 20_000


async def test_a_worker_that_is_gone_is_told_and_health_follows() -> None:
    async with cluster(http_port=0) as running, client(running.app.http_address) as web:
        assert (await web.get("/healthz")).json() == {"status": "serving"}
        await running.drafts[0].stop()
        async with events(web) as watching:
            state = await watching.next("state")
            while {worker["kind"]: worker["state"] for worker in state["workers"]}["draft"] != "lost":
                state = await watching.next("state")
            assert state["is_ready"]
            await running.targets[0].stop()
            while (await watching.next("state"))["is_ready"]:
                pass
        answer = await web.get("/healthz")
        assert (answer.status_code, answer.json()) == (503, {"status": "not serving"})
        await running.drafts[0].start()
        await running.targets[0].start()


async def test_before_the_service_is_ready_the_page_is_there_and_questions_are_refused() -> None:
    async with cluster(must_be_ready=False, http_port=0) as running, client(running.app.http_address) as web:
        assert (await web.get("/ui")).status_code == 200
        assert (await web.get("/ui/api/state")).json()["model"] is None
        async with asking(web, **SHORT) as asked:
            assert asked.status == 503
            assert "the service is still starting" in await asked.refusal()


# Answers


@pytest.mark.parametrize("mode", list(Mode))
async def test_an_answer_is_what_grpc_clients_get(service: Cluster, web: httpx2.AsyncClient, mode: Mode) -> None:
    options: dict[str, Any] = {**SHORT, "temperature": 0.7, "top_p": 0.9}
    expected = await service.client.answer(GenerateRequest(**options, mode=mode), timeout_s=30)
    async with asking(web, **options, mode=mode.value, request_id=f"page-{mode.value}") as asked:
        told = [event async for event in asked]
    assert [name for name, _ in told][:1] + [name for name, _ in told][-1:] == ["started", "finished"]
    started, finished = told[0][1], told[-1][1]
    pieces = [piece for name, data in told if name == "chunk" for piece in data["pieces"]]
    assert (started["request_id"], started["seed"]) == (f"page-{mode.value}", "5")
    assert [token for token, _, _ in pieces] == expected.token_ids
    assert "".join(text for _, text, _ in pieces) == expected.text
    assert finished["usage"]["completion_tokens"] == 24
    assert finished["speculation"]["mode"] == mode.value
    num_accepted = sum(origin == "accepted" for _, _, origin in pieces)
    assert finished["speculation"]["accepted_tokens"] == num_accepted


async def test_a_seed_beyond_javascript_s_integers_is_taken_as_text(service: Cluster, web: httpx2.AsyncClient) -> None:
    seed = 2**64 - 1
    expected = await service.client.answer(GenerateRequest(**{**SHORT, "seed": seed}), timeout_s=30)
    async with asking(web, **{**SHORT, "seed": str(seed)}) as asked:
        assert (await asked.next("started"))["seed"] == str(seed)
        pieces = [piece async for name, data in asked if name == "chunk" for piece in data["pieces"]]
    assert [token for token, _, _ in pieces] == expected.token_ids


async def test_ids_and_chats_are_prompts_too(web: httpx2.AsyncClient) -> None:
    for prompt in ({"prompt_token_ids": [5, 6, 7]}, {"chat": [{"role": "user", "content": "Hello"}]}):
        async with asking(web, **prompt, max_tokens=4, ignore_eos=True) as asked:
            assert (await asked.next("finished"))["usage"]["completion_tokens"] == 4


BAD: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": "x " * 2000},
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"top_k": -1},
    {"min_p": 1.5},
    {"max_tokens": 0},
    {"stop": ("",)},
    {"stop": ("x",) * 17},
    {"stop_token_ids": (4096,)},
    {"num_speculative_tokens": 0},
    {"model": "another"},
    {"request_id": "x" * 300},
)


@pytest.mark.parametrize("wrong", BAD, ids=lambda wrong: next(iter(wrong)))
async def test_what_grpc_refuses_is_refused_in_the_same_words(
    service: Cluster, web: httpx2.AsyncClient, wrong: dict[str, Any]
) -> None:
    with pytest.raises(SpecpipeError) as refused:
        await service.client.answer(GenerateRequest(**{**SHORT, **wrong}), timeout_s=30)
    async with asking(web, **{**SHORT, **wrong}) as asked:
        assert asked.status == (404 if "model" in wrong else 400)
        assert await asked.refusal() == str(refused.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "the request cannot be read: Expecting"),
        (b"\xff", "the request cannot be read: "),
        (b"[" * 100_000, "the request cannot be read: "),
        (b"[]", "the request must be a JSON object"),
        (b"{}", "input: one of prompt, prompt_token_ids and chat must be given"),
        (b'{"prompt": 5}', "prompt must be a text, got 5"),
        (b'{"prompt": "\\ud800"}', "prompt: half of a surrogate pair is no character"),
        (b'{"prompt": "a", "prompt_token_ids": [1]}', "input: prompt and prompt_token_ids are given; one may be"),
        (b'{"prompt_token_ids": [1.5]}', "prompt_token_ids[0] must be an integer, got 1.5"),
        (b'{"prompt_token_ids": [-1]}', "prompt_token_ids[0]: -1 is not a token id (0 to 4095)"),
        (b'{"chat": [{"role": "user"}]}', "chat: each message must be an object with role and content"),
        (b'{"prompt": "a", "max_token": 3}', "max_token: there is no such field"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens must be an integer, got True"),
        (b'{"prompt": "a", "max_tokens": 1.0}', "max_tokens must be an integer, got 1.0"),
        (b'{"prompt": "a", "top_k": 2147483648}', "top_k must be from -2147483648 to 2147483647, got 2147483648"),
        (b'{"prompt": "a", "seed": -1}', "seed must be from 0 to 18446744073709551615, got -1"),
        (b'{"prompt": "a", "seed": "x"}', "seed must be an integer, got 'x'"),
        (b'{"prompt": "a", "temperature": NaN}', "the request cannot be read: NaN is no JSON number"),
        (b'{"prompt": "a", "temperature": 1e300}', "temperature must be a finite number, got 1e+300"),
        (b'{"prompt": "a", "temperature": 1%s}' % (b"0" * 400), "temperature must be a finite number, got 1000"),
        (b'{"prompt": "a", "seed": "%s"}' % (b"9" * 5000), "seed must be an integer, got '9999"),
        (b'{"prompt": "a", "\\ud800": 1}', "\\ud800: there is no such field"),
        (b'{"prompt": "a", "temperature": "0"}', "temperature must be a number, got '0'"),
        (b'{"prompt": "a", "mode": "fast"}', "mode must be one of off, sync, pipelined, got 'fast'"),
        (b'{"prompt": "a", "stop": "x"}', "stop must be a list, got 'x'"),
        (b'{"prompt": "a", "ignore_eos": 1}', "ignore_eos must be true or false, got 1"),
    ],
)
async def test_what_only_json_can_say_is_refused_by_name(web: httpx2.AsyncClient, body: bytes, sentence: str) -> None:
    answer = await web.post("/ui/api/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert message_of(answer).startswith(sentence)


async def test_a_question_must_be_json_of_bounded_size(web: httpx2.AsyncClient) -> None:
    form = await web.post("/ui/api/generate", data={"prompt": "a"})
    assert (form.status_code, message_of(form)) == (415, "the request must be sent as application/json")
    large = await web.post(
        "/ui/api/generate", content=b" " * (MAX_BODY_BYTES + 1), headers={"content-type": "application/json"}
    )
    assert (large.status_code, message_of(large)) == (413, "the request is larger than 8 MiB")
    got = await web.get("/ui/api/generate")
    assert (got.status_code, message_of(got)) == (405, "GET is not for /ui/api/generate")


# Other sites


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://elsewhere.example"},
        {"origin": "null"},
        {"origin": "http://[elsewhere"},
        {"origin": "http://[elsewhere]"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "elsewhere.example"},
        {"host": "127.0.0.1.elsewhere.example:8080"},
        {"host": "localhost@elsewhere.example"},
        {"host": "]localhost["},
        {"host": "[localhost]"},
    ],
)
async def test_pages_of_other_sites_may_not_ask(web: httpx2.AsyncClient, headers: dict[str, str]) -> None:
    async with asking(web, headers, **SHORT) as asked:
        assert asked.status == 403
    assert (await web.get("/ui/api/events", headers=headers)).status_code == 403


async def test_the_page_itself_may_ask_by_any_name_of_this_machine(service: Cluster, web: httpx2.AsyncClient) -> None:
    port = service.app.http_address.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost:9999"):
        headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert (await web.get("/ui/api/state", headers=headers)).status_code == 200


# Ends


async def test_a_browser_that_leaves_ends_its_request(service: Cluster, web: httpx2.AsyncClient) -> None:
    async with asking(web, **LONG) as asked:
        await asked.next("chunk")
    await wait_until(lambda: service.is_idle)


async def test_a_browser_that_leaves_before_its_answer_began_ends_its_request() -> None:
    async with cluster(http_port=0, max_sessions=1) as running, client(running.app.http_address) as web:
        running.targets[0].gate.clear()
        tasks = [asyncio.ensure_future(web.post("/ui/api/generate", json=LONG)) for _ in range(2)]
        await wait_until(lambda: (running.coordinator.num_running, running.coordinator.num_waiting) == (1, 1))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        running.targets[0].gate.set()
        await wait_until(lambda: running.is_idle)


async def test_an_answer_that_breaks_off_says_why_and_is_not_finished() -> None:
    async with cluster(http_port=0) as running, client(running.app.http_address) as web:
        running.targets[0].gated.delay_s = 0.01
        async with asking(web, **LONG) as asked:
            await asked.next("chunk")
            running.targets[0].freeze()
            told = [event async for event in asked]
        assert asked.status == 200
        name, data = told[-1]
        assert (name, data["error"]["code"]) == ("error", "UNAVAILABLE")
        assert "no target worker took the request" in data["error"]["message"]
        assert "finished" not in [name for name, _ in told]


async def test_while_the_service_drains_the_page_finishes_its_answer_and_asks_in_vain() -> None:
    async with cluster(http_port=0) as running, client(running.app.http_address) as web:
        running.targets[0].gated.delay_s = 0.01
        async with asking(web, **LONG) as asked:
            await asked.next("chunk")
            running.targets[0].gate.clear()
            draining = asyncio.create_task(running.app.drain())
            await wait_until(lambda: not running.app.server.is_serving)
            refused = await web.post("/ui/api/generate", json=SHORT)
            assert (refused.status_code, message_of(refused)) == (503, "the service is stopping")
            state = (await web.get("/ui/api/state")).json()
            assert (state["is_ready"], state["is_stopping"]) == (False, True)
            running.targets[0].gate.set()
            assert [name async for name, _ in asked][-1] == "finished"
        await asyncio.wait_for(draining, 20)


async def test_a_stop_ends_answers_and_watchers_and_frees_the_port() -> None:
    async with AsyncExitStack() as browser:
        async with cluster(http_port=0) as running:
            address = running.app.http_address
            web = await browser.enter_async_context(client(address))
            running.targets[0].gated.delay_s = 0.05
            watching = await browser.enter_async_context(events(web))
            asked = await browser.enter_async_context(asking(web, **LONG))
            await asked.next("chunk")
            reading = [asyncio.ensure_future(_all(stream)) for stream in (asked, watching)]
        answer, watched = await asyncio.gather(*reading)
    assert answer[-1][0] == "error"
    assert "stopping" in answer[-1][1]["error"]["message"]
    assert {name for name, _ in watched} <= {"state", "spans"}
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(address.rpartition(":")[2])))


async def _all(stream: Events) -> list[tuple[str, Any]]:
    return [event async for event in stream]


async def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = int(taken.getsockname()[1])
        app = App(CoordinatorConfig(targets=("127.0.0.1:1",), http_port=port), create_server(ServerConfig(), []))
        with pytest.raises(ConfigError, match=f"^port {port} on 127.0.0.1 is already in use$"):
            async with app.running():
                pass


# The process


async def test_the_command_says_where_its_page_is_and_ends_while_pages_watch() -> None:
    target, draft = Worker("target", target_model()), Worker("draft", draft_model())
    async with AsyncExitStack() as stack:
        for worker in (target, draft):
            await worker.start()
            stack.push_async_callback(worker.end)
        flags = ("--target", target.address, "--draft", draft.address, "--tokenizer", str(DEMO), "--http-port", "0")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specpipe", "coordinator", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stack.callback(lambda: process.returncode is None and process.kill())
        assert process.stdout is not None
        words = (await process.stdout.readline()).decode().split()
        (http,) = [word.removeprefix("http=") for word in words if word.startswith("http=")]
        web = await stack.enter_async_context(client(http))
        watching = await stack.enter_async_context(events(web))
        assert (await watching.next("state"))["is_ready"]
        reading = asyncio.ensure_future(_all(watching))
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 20)
        await reading
        assert process.returncode == 0
        assert b"Traceback" not in log
        assert b"uvicorn" not in log

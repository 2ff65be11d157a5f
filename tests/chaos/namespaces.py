"""A network of the tests' own: a namespace for each process, joined by a bridge, and faults by nftables and tc.

Owns: namespaces, addresses, what is dropped, refused or slowed between whom. Must not know: processes, requests.
Root only. Nothing of it can be reached from outside, and nothing is left of it after the block.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from faults import Kind, Way

NETWORK = "10.213.0"  # of the namespaces alone
RESET_FOR_S = 1.5  # heartbeats come each second: by then both ends have sent something, and hear that all is over
LOSS_PERCENT = 10
RATE = ("rate", "256kbit", "burst", "16kb", "latency", "400ms")
TOOLS = ("ip", "nft", "tc")


class Namespaces:
    """Made by `namespaces`."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        self.prefix = prefix
        self.names = tuple(names)
        self._rules: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in names}  # by name, then by link

    def namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def address(self, name: str) -> str:
        return f"{NETWORK}.{10 + self.names.index(name)}"

    def command(self, name: str) -> tuple[str, ...]:
        """What a command line begins with, to run in this namespace."""
        return ("ip", "netns", "exec", self.namespace(name))

    async def set_rules(self, name: str, link: str, rules: Sequence[str]) -> None:
        """What happens to packets that come to `name`, as long as they are of this link; none: nothing."""
        self._rules[name][link] = tuple(rules)
        lines = ["table inet chaos {}", "flush table inet chaos", "table inet chaos {", "chain come {"]
        lines += ["type filter hook input priority 0; policy accept;"]
        lines += [rule for of_link in self._rules[name].values() for rule in of_link]
        await run(*self.command(name), "nft", "-f", "-", text="\n".join([*lines, "}", "}", ""]))

    async def set_rate(self, name: str, *, is_slow: bool) -> None:
        device = (*self.command(name), "tc", "qdisc", "replace", "dev", "eth0", "root")
        await run(*device, *(("tbf", *RATE) if is_slow else ("pfifo",)))


class NamespaceNetwork:
    """Links between namespaces, as `fleet.Network` wants them."""

    link_kinds = (Kind.CUT, Kind.HOLD, Kind.LOSS, Kind.RATE)

    def __init__(self, spaces: Namespaces) -> None:
        self._spaces = spaces
        self._kinds: dict[str, Kind] = {}

    def prefix(self, name: str) -> Sequence[str]:
        return self._spaces.command(name)

    def host(self, name: str) -> Sequence[str]:
        return ("--host", self._spaces.address(name))

    async def join(self, who: str, whom: str, address: str, *, is_worker: bool) -> str:
        return address

    async def begin(self, kind: Kind, link: str, ways: Iterable[Way]) -> None:
        self._kinds[link] = kind
        if kind is Kind.RATE:
            await self._spaces.set_rate(link.rpartition(">")[2], is_slow=True)
            return
        verdicts = {
            Kind.CUT: "tcp flags & syn == 0x0 reject with tcp reset",
            Kind.HOLD: "drop",
            Kind.LOSS: f"numgen random mod 100 < {LOSS_PERCENT} drop",
        }
        await self._set(link, ways or tuple(Way), verdicts[kind])
        if kind is Kind.CUT:
            await asyncio.sleep(RESET_FOR_S)
            await self.end(link)

    async def end(self, link: str) -> None:
        if self._kinds.pop(link) is Kind.RATE:
            await self._spaces.set_rate(link.rpartition(">")[2], is_slow=False)
        else:
            await self._set(link, tuple(Way), "")

    def shuffled(self) -> tuple[str, ...]:
        return ()

    async def _set(self, link: str, ways: Iterable[Way], verdict: str) -> None:
        who, _, whom = link.partition(">")
        ends = {Way.THERE: (who, whom), Way.BACK: (whom, who)}
        for way in ways:
            sender, receiver = ends[way]
            rule = f"ip saddr {self._spaces.address(sender)} {verdict}"
            await self._spaces.set_rules(receiver, link, [rule] if verdict else [])


async def run(*command: str, text: str = "") -> None:
    """Raises AssertionError with what the command says."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate(text.encode())
    assert process.returncode == 0, f"{' '.join(command)}: {said.decode()}\n{text}"


@contextmanager
def namespaces(names: Sequence[str]) -> Iterator[Namespaces]:
    """One for each name, and one for the bridge. Raises OSError where this machine cannot have them."""
    spaces = Namespaces(f"sp{secrets.token_hex(3)}", names)
    hub = f"{spaces.prefix}-hub"
    made = [hub, *(spaces.namespace(name) for name in names)]
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _join_hub(spaces, hub, name, f"v{number}")
        yield spaces
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _join_hub(spaces: Namespaces, hub: str, name: str, port: str) -> None:
    own = spaces.namespace(name)
    _ip("netns", "add", own)
    _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", own)
    _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
    _ip("-n", own, "address", "add", f"{spaces.address(name)}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", own, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def obstacle() -> str:
    """Why this machine cannot have such a network; empty: it can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, nftables)"
    try:
        with namespaces(["probe", "other"]) as spaces:
            asyncio.run(_probe(spaces))
    except (OSError, AssertionError) as error:
        return f"the kernel cannot: {error}"
    return ""


async def _probe(spaces: Namespaces) -> None:
    """Every kind of rule is taken."""
    network = NamespaceNetwork(spaces)
    for kind in (Kind.HOLD, Kind.LOSS, Kind.RATE):
        await network.begin(kind, "probe>other", ())
        await network.end("probe>other")
    await network._set("probe>other", tuple(Way), "tcp flags & syn == 0x0 reject with tcp reset")

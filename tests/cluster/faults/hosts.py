"""Two hosts on one machine: network namespaces with a link between them that can be cut in every way a network can be.

Each namespace has two interfaces: `DATA`, the link to the other one, with the address that the nodes advertise, and one by which
the test reaches the same address without that link. So the test is never cut off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvferry.local_cluster.spec import Role

DATA: Final = "data0"
MANAGE: Final = "manage0"
ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")
_PREFIX: Final = "kvferry-"

CUTS: Final[Mapping[str, Mapping[Role, str]]] = {
    # Rule of each namespace's firewall for outgoing packets on the link.
    "both ways": {"prefill": "drop", "decode": "drop"},
    "towards prefill": {"decode": "drop"},
    "towards decode": {"prefill": "drop"},
    "refused": {"prefill": "reject with tcp reset", "decode": "reject with tcp reset"},
}


def why_not() -> str:
    """Return why this machine cannot have such hosts; empty if it can."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} for network namespaces"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    probe = f"{_PREFIX}probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs the right to make network namespaces: {made.stderr.strip()}"
    try:
        rules = "table inet probe {\n}\n"
        filtered = subprocess.run(
            ["ip", "netns", "exec", probe, "nft", "-f", "-"], input=rules, capture_output=True, text=True, check=False
        )
        return f"needs nftables in the kernel: {filtered.stderr.strip()}" if filtered.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False)


def _run(*command: str, given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


def _until_running(name: str) -> None:
    """Wait until the kernel reports that the link is up; UCX sees no device before."""
    ends_s = time.monotonic() + 10
    while (
        "state UP"
        not in subprocess.run(["ip", "-n", name, "link", "show", DATA], capture_output=True, text=True, check=False).stdout
    ):
        assert time.monotonic() < ends_s, f"{DATA} of {name} does not come up"
        time.sleep(0.02)


class Hosts:
    """One namespace for each role. Use `open_hosts()`."""

    def __init__(self) -> None:
        number = os.getpid() % 200
        self._network = f"10.{40 + number}"
        self._names: dict[Role, str] = {role: f"{_PREFIX}{role}-{os.getpid()}" for role in ROLES}
        self._links: dict[Role, str] = {role: f"kvf{index}-{os.getpid()}" for index, role in enumerate(ROLES, start=1)}

    def address(self, role: Role) -> str:
        """Return the address of a namespace on the link."""
        return f"{self._network}.0.{1 + ROLES.index(role)}"

    def prefix(self, role: Role) -> tuple[str, ...]:
        """Return the prefix of a command line that runs in the namespace; the process keeps its id."""
        return ("ip", "netns", "exec", self._names[role])

    def name(self, role: Role) -> str:
        """Return the name of a namespace."""
        return self._names[role]

    def open(self) -> None:
        """Make the namespaces and join them."""
        first, second = (self._names[role] for role in ROLES)
        for name in (first, second):
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", DATA, "netns", first, "type", "veth", "peer", "name", DATA, "netns", second)
        for index, role in enumerate(ROLES, start=1):
            name, here, network = self._names[role], self._links[role], f"{self._network}.{index}"
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(role)}/24", "dev", DATA)
            _run("ip", "-n", name, "link", "set", DATA, "up")
            _run("ip", "link", "add", here, "type", "veth", "peer", "name", MANAGE, "netns", name)
            _run("ip", "addr", "add", f"{network}.1/24", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run("ip", "-n", name, "addr", "add", f"{network}.2/24", "dev", MANAGE)
            _run("ip", "-n", name, "link", "set", MANAGE, "up")
            _run("ip", "route", "add", f"{self.address(role)}/32", "via", f"{network}.2")
        for name in (first, second):
            _until_running(name)

    def close(self) -> None:
        """Delete links and namespaces. The kernel deletes links of a namespace late, and the next hosts have the same names."""
        for link in self._links.values():
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def cut(self, how: str) -> None:
        """Cut the link in one of the ways of `CUTS`."""
        for role, verdict in CUTS[how].items():
            self._filter(role, f"meta l4proto tcp {verdict}" if "tcp" in verdict else verdict)

    def heal(self) -> None:
        """End all cuts."""
        for name in self._names.values():
            _run("ip", "netns", "exec", name, "nft", "flush", "ruleset")

    def _filter(self, role: Role, verdict: str) -> None:
        rules = f'table inet chaos {{\nchain out {{\ntype filter hook output priority 0;\noifname "{DATA}" {verdict}\n}}\n}}\n'
        _run(*self.prefix(role), "nft", "-f", "-", given=rules)


@contextmanager
def open_hosts() -> Iterator[Hosts]:
    """Open two joined hosts, and delete them afterwards."""
    hosts = Hosts()
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()

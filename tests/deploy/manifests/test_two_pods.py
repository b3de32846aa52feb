"""The daemons of both pods of an overlay run with the rendered settings, each in its own network namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.demo.model import make_demo_model
from tests.authority import Authority, Files
from tests.cluster.faults.hosts import Hosts, open_hosts, why_not
from tests.deploy.manifests.containers import Disk, environment
from tests.deploy.manifests.kustomize import ROOT, Manifest, Pod, of_kind, pods

READY_S = 150.0
END_S = 30.0
CPU = ("--set", "device=cpu", "--set", "parallel.tp_size=1", "--set", "pool.num_pages=512")
"""Options for a machine without GPU and with few cores."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with open_hosts() as found:
        yield found


@contextmanager
def names_of(hosts: Hosts, variant: str) -> Iterator[None]:
    """Resolve the names of Services to their pods. `ip netns exec` mounts the written files over /etc/hosts."""
    lines = ["127.0.0.1 localhost"]
    for service in of_kind(variant, "Service"):
        role = service["spec"]["selector"]["app.kubernetes.io/component"]
        lines.append(f"{hosts.address(role)} {service['metadata']['name']}")
    folders = [Path("/etc/netns") / hosts.name(role) for role in ("prefill", "decode")]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield
    finally:
        for folder in folders:
            (folder / "hosts").unlink(missing_ok=True)
            folder.rmdir()


@contextmanager
def started(command: list[str], variables: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with `variables` as its only variables of kvferry; after the block, kill it and print its log."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**kept, **variables}, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        print(f"--- {log.name}, exit code {process.returncode}", *log.read_text(errors="replace").splitlines()[-40:], sep="\n")


def answer(address: str, probe: Mapping[str, Any], ports: Mapping[str, int]) -> int:
    """Return the HTTP status of a probe; 0 if the port is closed."""
    url = f"http://{address}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
    try:
        with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def until_ready(process: subprocess.Popen[bytes], address: str, pod: Pod, container: Manifest) -> None:
    ends_s = time.monotonic() + READY_S
    while answer(address, container["readinessProbe"], pod.container_ports()) != 200:
        assert process.poll() is None, f"{pod.of} has ended with {process.returncode}"
        assert time.monotonic() < ends_s, f"{pod.of} is not ready"
        time.sleep(0.5)


@pytest.mark.parametrize("variant", ["dev-tcp", "two-tier"])
def test_two_pods_find_each_other_serve_and_drain(
    variant: str, hosts: Hosts, model: Path, authority: Authority, tmp_path: Path
) -> None:
    found = {pod.labels["app.kubernetes.io/component"]: pod for pod in pods(variant)}
    with ExitStack() as stack:
        stack.enter_context(names_of(hosts, variant))
        processes = {}
        for role in ("decode", "prefill"):  # the decode node starts first, and waits for the prefill node
            pod, (container,) = found[role], found[role].nodes
            disk = Disk(tmp_path / role, variant, pod, container, model, authority)
            variables = {
                name: disk.here(value)
                for name, value in environment(pod, container, hosts.address(role)).items()
                if name != "HOME"
            }
            command = [*hosts.prefix(role), sys.executable, "-m", f"{role}_node", *map(disk.here, container["args"]), *CPU]
            processes[role] = stack.enter_context(started(command, variables, tmp_path / f"{role}.log"))
        for role, process in processes.items():
            until_ready(process, hosts.address(role), found[role], found[role].nodes[0])
        answered = generate(hosts, variant, authority, tmp_path / "client")
        assert answered.returncode == 0 and answered.stdout.strip(), answered.stderr
        # Both nodes share a pid namespace here, but the settings must not use it.
        assert '"lane": "ucx/net"' in (tmp_path / "decode.log").read_text()

        # After the prefill node ends, the decode pod is not ready, but stays alive.
        processes["prefill"].send_signal(signal.SIGTERM)
        assert processes["prefill"].wait(END_S) == 0
        decode, (container,) = found["decode"], found["decode"].nodes
        ends_s = time.monotonic() + END_S
        while answer(hosts.address("decode"), container["readinessProbe"], decode.container_ports()) != 503:
            assert time.monotonic() < ends_s, "the decode node is still ready without a prefill node"
            time.sleep(0.2)
        assert answer(hosts.address("decode"), container["livenessProbe"], decode.container_ports()) == 200
        processes["decode"].send_signal(signal.SIGTERM)
        assert processes["decode"].wait(END_S) == 0


def generate(hosts: Hosts, variant: str, authority: Authority, folder: Path) -> subprocess.CompletedProcess[str]:
    """Call the node by the Service's name, with the certificate that the manifests create for clients."""
    if variant == "dev-tcp":
        security = ["--insecure-anywhere"]
    else:
        names = {one["metadata"]["name"]: one["spec"].get("dnsNames", [""])[0] for one in of_kind(variant, "Certificate")}
        folder.mkdir()
        files = Files(folder=folder)
        chain, key = authority.issue(names["kvferry-client"])
        files.put(cert=chain, key=key, ca=authority.pem)
        security = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
    options = ["--target", "kvferry:7100", "--max-new-tokens", "8", "The tide"]
    command = [sys.executable, "-m", "kvferry", "generate", *security, *options]
    return subprocess.run([*hosts.prefix("decode"), *command], capture_output=True, text=True, timeout=120, cwd=ROOT)

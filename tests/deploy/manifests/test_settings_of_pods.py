"""The daemons accept the command line, variables and volumes of each container of the manifests."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from node_runtime.health import HealthServer, Readiness
from tests.authority import Authority
from tests.deploy.manifests.containers import CONFIGS, POD_IP, Disk, check_config, environment, variables_of
from tests.deploy.manifests.kustomize import RDMA, ROOT, VARIANTS, Manifest, Pod, of_kind, pods, pods_and_variants, role_of
from tests.deploy.monitoring.prometheus import program
from tests.deploy.monitoring.promql_check import DECLARED, selectors
from transfer.config import DecodeNodeConfig, NodeConfig
from transfer.load_config import load_config
from transfer.metrics import MetricsPage, NodeMetrics, RankMetrics
from transfer.peer_names import SubjectNames, first_match

OF_OTHERS = re.compile(r"HOME|POD_NAME|UCX_[A-Z_]+|AWS_[A-Z_]+|OTEL_[A-Z_]+|NVIDIA_[A-Z_]+")
"""Variables of the containers for other programs and libraries."""

SERVICE_LINKS = {
    "KVFERRY_SERVICE_HOST": "10.96.0.7",
    "KVFERRY_SERVICE_PORT": "7100",
    "KVFERRY_SERVICE_PORT_GRPC": "7100",
    "KVFERRY_PORT": "tcp://10.96.0.7:7100",
    "KVFERRY_PORT_7100_TCP": "tcp://10.96.0.7:7100",
    "KVFERRY_PORT_7100_TCP_ADDR": "10.96.0.7",
}
"""Variables that Kubernetes would add for the Service `kvferry`. The pods disable them, and the daemons ignore them."""


@pods_and_variants()
def test_the_command_line_of_each_container_is_accepted(
    variant: str, model: Path, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon runs with --check-config. Only the options for a machine without a GPU are added."""
    for pod in pods(variant):
        for container in pod.nodes:
            role = role_of(container)
            assert role is not None
            disk = Disk(tmp_path / pod.name / container["name"], variant, pod, container, model, authority)
            names = [one["name"] for one in container["env"]]
            assert len(names) == len(set(names))
            assert [name for name in names if name not in variables_of(role) and OF_OTHERS.fullmatch(name) is None] == []
            here = {name: disk.here(value) for name, value in environment(pod, container).items()}
            without_gpu = ["--set", "device=cpu"]
            if here.get("KVFERRY_TRANSPORT__NAME") == "cuda_ipc":
                without_gpu += ["--set", "transport.name=ucx"]
            with monkeypatch.context() as patch:
                for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
                    patch.delenv(name)
                for name, value in {**here, **SERVICE_LINKS}.items():
                    if name.startswith("KVFERRY_"):
                        patch.setenv(name, value)
                output = check_config(role, [*map(disk.here, container["args"]), *without_gpu])
            assert ("without TLS" in output) is (variant == "dev-tcp")


def configured(variant: str, pod: Pod, container: Manifest) -> NodeConfig:
    """Return a container's settings as its daemon reads them, with the paths of the container."""
    mounts = {mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/etc/kvferry"}
    (name,) = [one["configMap"]["name"] for one in pod.spec["volumes"] if one["name"] in mounts]
    (content,) = [one["data"]["settings.yaml"] for one in of_kind(variant, "ConfigMap") if one["metadata"]["name"] == name]
    role = role_of(container)
    assert role is not None
    return load_config(CONFIGS[role], environment=environment(pod, container), given={"ConfigMap": yaml.safe_load(content)})


@pods_and_variants()
def test_container_ports_and_probes_match_the_ports_of_the_nodes(variant: str) -> None:
    for pod in pods(variant):
        for container in pod.nodes:
            config = configured(variant, pod, container)
            assert {port["containerPort"] for port in container["ports"]} == {config.server.port, config.server.http_port}
            named = {port["containerPort"]: port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container[probe]["httpGet"]["port"] == named[config.server.http_port]
            assert config.server.host == "0.0.0.0"  # probes connect to the pod's address
            assert config.server.advertise_host == (POD_IP if container["name"] == "node" else "127.0.0.1")


@pods_and_variants()
def test_decode_nodes_find_prefill_nodes_by_service_or_by_address(variant: str) -> None:
    for pod in pods(variant):
        for container in pod.nodes:
            config = configured(variant, pod, container)
            if not isinstance(config, DecodeNodeConfig):
                continue
            if config.discovery.kind == "dns":
                name, _, port = str(config.discovery.dns_name).partition(":")
                (service,) = [one for one in of_kind(variant, "Service") if one["metadata"]["name"] == name]
                assert service["spec"]["clusterIP"] == "None"  # DNS returns the address of each node
                assert service["spec"]["publishNotReadyAddresses"] is True
                assert [one["port"] for one in service["spec"]["ports"]] == [int(port)]
                assert service["spec"]["selector"]["app.kubernetes.io/component"] == "prefill"
            else:
                assert VARIANTS[variant][0] in ("lws", "single-node")
                assert config.peers.prefill_nodes
                assert not [one for one in of_kind(variant, "Service") if one["metadata"]["name"] == "kvferry-prefill"]


def names_in_certificates(variant: str) -> dict[str, SubjectNames]:
    """Return the names in certificates by owner: prefill, decode, client."""
    return {
        one["metadata"]["name"].removeprefix("kvferry-"): SubjectNames(dns=tuple(one["spec"]["dnsNames"]))
        for one in of_kind(variant, "Certificate")
        if "dnsNames" in one["spec"]
    }


@pods_and_variants()
def test_each_tier_accepts_certificates_of_the_other_tier_and_of_clients(variant: str) -> None:
    """No other name in a certificate is accepted, such as the name of a Service."""
    names = names_in_certificates(variant)
    assert set(names) == (set() if variant == "dev-tcp" else {"prefill", "decode", "client"})
    for pod in pods(variant):
        for container in pod.nodes:
            config, role = configured(variant, pod, container), role_of(container)
            if variant == "dev-tcp":
                assert config.tls.insecure == 2 and not names
                continue
            assert config.tls.insecure == 0
            other = "decode" if role == "prefill" else "prefill"
            for owner, found in names.items():
                own = f"{owner}.kvferry.internal"
                assert first_match(config.tls.peer_names, found) == (own if owner == other else None)
                assert first_match(config.tls.client_names, found) == (own if owner == "client" else None)
            assert (len(config.tls.peer_names), len(config.tls.client_names)) == (1, 1)


@pytest.mark.parametrize("variant", ["two-tier", "single-node", "lws"])
def test_a_plain_grpc_client_connects_by_the_names_of_services(variant: str, authority: Authority) -> None:
    """gRPC checks the certificate of the server by the name of the Service, without further options."""
    server = grpc.server(ThreadPoolExecutor(1))
    chain, key = authority.issue(*names_in_certificates(variant)["decode"].dns)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)], authority.pem, True))
    server.start()
    chain, key = authority.issue(*names_in_certificates(variant)["client"].dns)
    credentials = grpc.ssl_channel_credentials(authority.pem, key, chain)
    try:
        for name in ("kvferry", "kvferry-decode"):
            with grpc.secure_channel(f"127.0.0.1:{port}", credentials, [("grpc.ssl_target_name_override", name)]) as channel:
                grpc.channel_ready_future(channel).result(timeout=10)
    finally:
        server.stop(None)


async def test_probes_and_scrapes_use_paths_that_the_nodes_serve() -> None:
    """The real HTTP server answers. A node without peers is not ready, but alive."""
    server = HealthServer(lambda: Readiness(is_ready=False, reason="no prefill node is joined"), lambda: ())
    port = await server.start("127.0.0.1", 0)

    def status(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        for variant in VARIANTS:
            for pod in pods(variant):
                for container in pod.nodes:
                    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
                    found = {kind: await asyncio.to_thread(status, path) for kind, path in paths.items()}
                    assert found == {"startup": 200, "liveness": 200, "readiness": 503}, pod.of
            for monitor in of_kind(variant, "PodMonitor"):
                for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                    assert await asyncio.to_thread(status, endpoint["path"]) == 200
    finally:
        await server.stop()


def adapter_rules() -> dict[str, dict[str, Any]]:
    """Return the rules of prometheus-adapter in deploy/README.md, by the name of their metric."""
    readme = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    (adapter,) = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", readme, re.S) if "metricsQuery" in text]
    return {rule["name"]["as"]: rule for rule in adapter["rules"]}


def asked_of_adapter(rule: dict[str, Any], role: str) -> str:
    """Return the query of prometheus-adapter for the pods of a tier."""
    series = re.sub(r"\{.*", "", rule["seriesQuery"])
    query = str(rule["metricsQuery"]).replace("<<.Series>>", series)
    return query.replace("<<.LabelMatchers>>", f'pod=~"{role}-.*"').replace("<<.GroupBy>>", "pod")


def test_autoscalers_query_existing_metrics() -> None:
    queries = [trigger["metadata"]["query"] for one in of_kind("keda", "ScaledObject") for trigger in one["spec"]["triggers"]]
    assert len(queries) == 4
    given = adapter_rules()
    for query in (*queries, *(asked_of_adapter(rule, "decode") for rule in given.values())):
        assert {selector.name for selector in selectors(query)} <= DECLARED.keys()
    scalers = of_kind("hpa", "HorizontalPodAutoscaler")
    assert {metric["pods"]["metric"]["name"] for one in scalers for metric in one["spec"]["metrics"]} == set(given)


def targets() -> dict[tuple[str, str], list[tuple[str, float]]]:
    """Return the queries by scaler and role, each with a single value for the tier and the target value per node."""
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for one in of_kind("keda", "ScaledObject"):
        role = one["metadata"]["name"].removeprefix("kvferry-")
        found["keda", role] = [
            (" ".join(trigger["metadata"]["query"].split()), float(trigger["metadata"]["threshold"]))
            for trigger in one["spec"]["triggers"]
        ]
    rules = adapter_rules()
    for one in of_kind("hpa", "HorizontalPodAutoscaler"):
        role = one["metadata"]["name"].removeprefix("kvferry-")
        found["hpa", role] = [
            (
                f"sum({asked_of_adapter(rules[metric['pods']['metric']['name']], role)})",
                milli(metric["pods"]["target"]["averageValue"]),
            )
            for metric in one["spec"]["metrics"]
        ]
    return found


def milli(quantity: str) -> float:
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


LOADS: dict[str, tuple[dict[str, tuple[float, int, int, int]], set[str]]] = {
    # By role: busy share of the engine, queued requests, running requests, used pages of 100. Then the roles that must grow.
    "idle": ({"prefill": (0.05, 0, 1, 5), "decode": (0.1, 0, 2, 5)}, set()),
    "as sized": ({"prefill": (0.8, 0, 6, 30), "decode": (0.95, 3, 70, 60)}, set()),
    "prefill is short": ({"prefill": (1.0, 40, 32, 90), "decode": (0.9, 40, 40, 35)}, {"prefill"}),
    "decode has no pages": ({"prefill": (0.5, 60, 4, 20), "decode": (1.0, 80, 60, 100)}, {"decode"}),
    "decode is at its limit": ({"prefill": (0.5, 60, 4, 20), "decode": (1.0, 80, 128, 70)}, {"decode"}),
    "both are short": ({"prefill": (1.0, 60, 32, 80), "decode": (1.0, 80, 128, 99)}, {"prefill", "decode"}),
}


@pytest.mark.parametrize("load", LOADS)
def test_only_the_overloaded_tier_grows(load: str, tmp_path: Path) -> None:
    """Prometheus evaluates the queries for two nodes per tier. Both scalers request more nodes only for overloaded tiers."""
    nodes, grow = LOADS[load]
    series = {}
    for role, (busy, queued, running, taken) in nodes.items():
        for node in range(2):
            labels = f'role="{role}",instance="10.0.0.{node}:7180",pod="{role}-{node}"'
            for rank in range(2):
                series[f'kvferry_step_seconds_sum{{{labels},rank="{rank}"}}'] = f"0+{busy * 15:g}x40"
                for state, pages in (("free", 100 - taken), ("reserved", taken // 2), ("bound", taken - taken // 2)):
                    series[f'kvferry_pool_pages{{{labels},rank="{rank}",group="full",state="{state}"}}'] = f"{pages}x40"
            series[f"kvferry_queued_requests{{{labels}}}"] = f"{queued}x40"
            series[f"kvferry_running_requests{{{labels}}}"] = f"{running}x40"
            series[f"kvferry_max_running_requests{{{labels}}}"] = "128x40"
    for (_, role), found in targets().items():
        assert len(found) == 2
        of_tier = [f"ceil(({query}) / {most:g} - 0.2)" for query, most in found]  # the HPA tolerates a tenth
        assert_holds(tmp_path, series, of_tier, is_more=role in grow)


def assert_holds(folder: Path, series: dict[str, str], queries: list[str], *, is_more: bool) -> None:
    """Assert whether one of the queries, each with a number of nodes, is above two."""
    either = " or ".join(f"(({query}) > 2)" for query in queries)
    assert_answers(folder, series, {f"sum({either}) > bool 2": 1.0 if is_more else None})


def assert_answers(folder: Path, series: dict[str, str], answers: dict[str, float | None]) -> None:
    """Assert the value of each query after eight minutes; None means that the query has no value."""
    expected = [
        {"expr": query, "eval_time": "8m", "exp_samples": [] if value is None else [{"labels": "{}", "value": value}]}
        for query, value in answers.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "15s", "input_series": given, "promql_expr_test": expected}
    page = {"rule_files": [], "evaluation_interval": "15s", "tests": [case]}
    (folder / "scaling.yaml").write_text(yaml.safe_dump(page))
    command = [program("promtool"), "test", "rules", "scaling.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def scraped(role: str, node: int, *, state: str = "ready", are_ranks_there: bool = True) -> dict[str, str]:
    """Return the series of an idle node, as the node exports them."""
    leader, rank = NodeMetrics(role=role), RankMetrics(role=role, rank=0)
    leader.limits(max_queued=256, max_running=128)
    leader.node_state(state=state, queued=0, running=0, peers={}, restarts=0)
    pools = {"pools": [{"group": "full", "pages": 100, "reserved": 0, "bound": 0}]}
    families = leader.collect([rank.snapshot(pools) if are_ranks_there else None])
    page = MetricsPage().render(families)[0].decode()
    found = re.findall(r"^(kvferry_\w+)\{(.*)\} ([0-9.e+-]+)$", page, re.M)
    return {f'{name}{{{labels},instance="10.0.0.{node}:7180"}}': f"{value}x40" for name, labels, value in found}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_idle_tier_has_a_value_and_a_tier_without_series_has_none(role: str, tmp_path: Path) -> None:
    """KEDA treats a missing value as a failure and keeps the nodes. Otherwise it would read 0, and remove nodes."""
    queries = [query for query, _ in targets()["keda", role]]
    assert_answers(tmp_path, {**scraped(role, 1), **scraped(role, 2)}, dict.fromkeys(queries, 0.0))
    assert_answers(tmp_path, {}, dict.fromkeys(queries, None))
    for one in of_kind("keda", "ScaledObject"):
        assert one["spec"]["fallback"]["behavior"] == "currentReplicasIfHigher"
        assert [trigger["metadata"]["ignoreNullValues"] for trigger in one["spec"]["triggers"]] == ["false"] * 2


BY_RDMA = {"rc", "ud", "srd"}
"""RDMA transports of UCX between machines; srd is for EFA."""


def ucx_tls(variant: str) -> str:
    """Return UCX_TLS, which is the same for all nodes of a variant."""
    (found,) = {one["value"] for pod in pods(variant) for node in pod.nodes for one in node["env"] if one["name"] == "UCX_TLS"}
    return str(found)


@pytest.mark.parametrize("variant", sorted(RDMA))
def test_missing_rdma_does_not_fall_back_to_tcp(variant: str) -> None:
    for pod in pods(variant):
        for container in pod.nodes:
            config = configured(variant, pod, container)
            assert config.transport.name == "nixl"  # only the UCX of nixl supports verbs
            assert config.transport.min_bandwidth_bytes_per_s >= 10**9
            assert [one["name"] for one in container["env"]].count("UCX_TLS") == 1
    ways = set(ucx_tls(variant).split(","))
    assert ways & BY_RDMA and ways - BY_RDMA == {"cuda_copy", "self"}  # both stay within the process

"""Manifests agree with each other on names, labels, ports and network policies. Schemas do not check this."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

import yaml

import transfer
from node_runtime.supervisor import STOP_GRACE_S
from tests.deploy.manifests.kustomize import (
    KUBERNETES,
    RDMA,
    VARIANTS,
    Manifest,
    Pod,
    matches,
    name_of,
    of_kind,
    pods,
    pods_and_variants,
    rendered,
    role_of,
)

DOCKERFILE = (KUBERNETES.parent / "Dockerfile").read_text(encoding="utf-8")
BROUGHT = {"PersistentVolumeClaim": {"kvferry-models"}, "Secret": {"kvferry-s3"}}
"""Objects that the operator creates, see deploy/README.md."""

DNS = {"k8s-app": "kube-dns"}
COLLECTOR = {"app.kubernetes.io/name": "opentelemetry-collector"}
CLIENT = {"kvferry-access": "client"}
OPERATOR = {"kvferry-access": "operator"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
STRANGER = {"app": "somebody-else"}
ANYWHERE = {"ipBlock": {"cidr": "0.0.0.0/0"}}
RANK_PORT = 43_210
"""An ephemeral port, as ranks use them."""


def tier(variant: str, role: str) -> list[Pod]:
    return [pod for pod in pods(variant) if pod.labels["app.kubernetes.io/component"] == role]


def containers(variant: str) -> Iterator[tuple[Pod, Manifest]]:
    for pod in pods(variant):
        for container in [*pod.spec.get("initContainers", []), *pod.spec["containers"]]:
            yield pod, container


@pods_and_variants()
def test_selectors_of_workloads_match_only_their_own_pods(variant: str) -> None:
    for one in of_kind(variant, "Deployment"):
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert matches(one["spec"]["selector"], labels)
        others = [pod for pod in pods(variant) if pod.of != name_of(one)]
        assert not [pod.of for pod in others if matches(one["spec"]["selector"], pod.labels)]
    for pod in pods(variant):
        for spread in pod.spec["topologySpreadConstraints"]:
            assert matches(spread["labelSelector"], pod.labels), pod.of
        near = pod.spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        for one in near:
            assert all(matches(one["podAffinityTerm"]["labelSelector"], other.labels) for other in pods(variant))


@pods_and_variants()
def test_services_target_existing_ports(variant: str) -> None:
    services = of_kind(variant, "Service")
    assert {one["metadata"]["name"] for one in services} >= {"kvferry", "kvferry-decode"}
    roles = {}
    for one in services:
        taken = [pod for pod in pods(variant) if matches({"matchLabels": one["spec"]["selector"]}, pod.labels)]
        for port in one["spec"]["ports"]:
            assert {pod.container_ports()[port["targetPort"]] for pod in taken} == {7100} == {port["port"]}
        roles[one["metadata"]["name"]] = {pod.labels["app.kubernetes.io/component"] for pod in taken}
    assert roles.pop("kvferry-prefill", {"prefill"}) == {"prefill"}
    assert set(map(frozenset, roles.values())) == {frozenset({"decode"})}  # no Service for clients targets the prefill tier


@pods_and_variants()
def test_ports_of_a_pod_differ_and_each_workload_has_a_disruption_budget(variant: str) -> None:
    for pod in pods(variant):
        ports = [port for one in pod.spec["containers"] for port in one["ports"]]
        assert len({port["name"] for port in ports}) == len(ports) == len({port["containerPort"] for port in ports})
    budgets = of_kind(variant, "PodDisruptionBudget")
    taken = [[pod.of for pod in pods(variant) if matches(one["spec"]["selector"], pod.labels)] for one in budgets]
    assert all(len(one) == 1 for one in taken)
    assert len(budgets) == len(pods(variant))


@pods_and_variants()
def test_autoscalers_and_pod_monitors_have_existing_targets(variant: str) -> None:
    workloads = {(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in of_kind(variant, "Deployment")}
    scalers = of_kind(variant, "HorizontalPodAutoscaler") + of_kind(variant, "ScaledObject")
    for one in scalers:
        target = one["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"], target["name"]) in workloads
        scaled = next(each for each in of_kind(variant, "Deployment") if each["metadata"]["name"] == target["name"])
        assert "replicas" not in scaled["spec"], "replicas would override the autoscaler when the manifests are applied again"
    if set(VARIANTS[variant][1]) & {"hpa", "keda"}:
        assert len(scalers) == 2
    for one in of_kind(variant, "PodMonitor"):
        taken = [pod for pod in pods(variant) if matches(one["spec"]["selector"], pod.labels)]
        assert len(taken) == len(pods(variant))
        for endpoint in one["spec"]["podMetricsEndpoints"]:
            assert all(endpoint["port"] in pod.container_ports() for pod in taken)
        assert {pod.labels[one["spec"]["jobLabel"]] for pod in taken} == {"kvferry"}


@pods_and_variants()
def test_every_object_that_a_pod_references_exists(variant: str) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in rendered(variant)}
    there |= {("Secret", one["spec"]["secretName"]) for one in of_kind(variant, "Certificate")}
    there |= {(kind, name) for kind, names in BROUGHT.items() for name in names}
    for pod in pods(variant):
        assert ("ServiceAccount", pod.spec["serviceAccountName"]) in there
        for volume in pod.spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in there
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in there
            assert len(volume) == 2, f"{pod.of}: volume {volume['name']} must have one source: {sorted(volume)}"
        for one in pod.spec.get("resourceClaims", []):
            assert ("ResourceClaimTemplate", one["resourceClaimTemplateName"]) in there
        names = {volume["name"] for volume in pod.spec["volumes"]}
        for _, container in containers(variant):
            for source in container.get("envFrom", []):
                assert ("Secret", source["secretRef"]["name"]) in there
            if container in pod.spec["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= names
                claims = {one["name"] for one in container["resources"].get("claims", [])}
                assert claims <= {one["name"] for one in pod.spec.get("resourceClaims", [])}
    for one in of_kind(variant, "Certificate"):
        assert (one["spec"]["issuerRef"]["kind"], one["spec"]["issuerRef"]["name"]) in there
    for one in of_kind(variant, "Issuer"):
        if "ca" in one["spec"]:
            assert ("Secret", one["spec"]["ca"]["secretName"]) in there


def _ports_allow(rule: Manifest, port: int, protocol: str, named: dict[str, int]) -> bool:
    if "ports" not in rule:
        return True
    for one in rule["ports"]:
        begin = named.get(one["port"]) if isinstance(one["port"], str) else one["port"]
        if one["protocol"] == protocol and begin is not None and begin <= port <= one.get("endPort", begin):
            return True
    return False


def _sides_allow(sides: list[Manifest] | None, labels: dict[str, str], *, is_same_namespace: bool) -> bool:
    if sides is None:
        return True
    return any(
        (is_same_namespace or "namespaceSelector" in one) and matches(one.get("podSelector", {}), labels)
        for one in sides
        if "ipBlock" not in one  # does not match pods
    )


def _rules(variant: str, pod: Pod, direction: str) -> list[Manifest] | None:
    """Return the combined rules of all policies of a pod; None if no policy applies to that direction."""
    policies = [one["spec"] for one in of_kind(variant, "NetworkPolicy") if matches(one["spec"]["podSelector"], pod.labels)]
    policies = [one for one in policies if direction in one["policyTypes"]]
    return [rule for one in policies for rule in one.get(direction.lower(), [])] if policies else None


def may_reach(variant: str, labels: dict[str, str], pod: Pod, port: int, *, is_same_namespace: bool = True) -> bool:
    """Return whether the policies of a pod allow connections from pods with these labels."""
    rules = _rules(variant, pod, "Ingress")
    return rules is None or any(
        _sides_allow(rule.get("from"), labels, is_same_namespace=is_same_namespace)
        and _ports_allow(rule, port, "TCP", pod.container_ports())
        for rule in rules
    )


def may_call(
    variant: str, pod: Pod, labels: dict[str, str], port: int, *, is_same_namespace: bool = True, protocol: str = "TCP"
) -> bool:
    """Return whether the policies of a pod allow connections to pods with these labels."""
    rules = _rules(variant, pod, "Egress")
    return rules is None or any(
        _sides_allow(rule.get("to"), labels, is_same_namespace=is_same_namespace) and _ports_allow(rule, port, protocol, {})
        for rule in rules
    )


def may_call_address(variant: str, pod: Pod, address: str, port: int) -> bool:
    """Return whether the policies of a pod allow TCP connections to an address outside of the pods."""
    rules = [rule for rule in _rules(variant, pod, "Egress") or [] if _ports_allow(rule, port, "TCP", {})]
    cidrs = [side["ipBlock"]["cidr"] for rule in rules for side in rule.get("to", [ANYWHERE]) if "ipBlock" in side]
    return any(ipaddress.ip_address(address) in ipaddress.ip_network(cidr) for cidr in cidrs)


@pods_and_variants()
def test_only_pods_with_a_store_may_reach_the_cloud_s_credentials(variant: str) -> None:
    """The addresses are instance metadata and EKS Pod Identity: https://docs.aws.amazon.com/eks/latest/userguide/pod-id-how-it-works.html."""
    has_store = "s3-backup" in VARIANTS[variant][1]
    for pod in pods(variant):
        for address in ("169.254.169.254", "169.254.170.23"):
            allowed = [port for port in (22, 80, 2703, RANK_PORT) if may_call_address(variant, pod, address, port)]
            assert allowed == [80] * has_store
        for address in ("169.254.169.253", "169.254.170.2", "10.0.0.9", "198.51.100.7"):
            assert not may_call_address(variant, pod, address, 80)
            assert may_call_address(variant, pod, address, 443) is has_store


@pods_and_variants()
def test_policies_allow_all_planes_between_the_tiers(variant: str) -> None:
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        for pod in tier(variant, one):
            for peer in tier(variant, other):
                for port in (7100, RANK_PORT):
                    assert may_call(variant, pod, peer.labels, port)
                    assert may_reach(variant, pod.labels, peer, port)
            for protocol in ("UDP", "TCP"):
                assert may_call(variant, pod, DNS, 53, is_same_namespace=False, protocol=protocol)


@pods_and_variants()
def test_policies_allow_each_caller_only_its_own_ports(variant: str) -> None:
    for pod in tier(variant, "decode"):
        assert [port for port in (7100, 7180, RANK_PORT) if may_reach(variant, CLIENT, pod, port)] == [7100]
    for pod in tier(variant, "prefill"):
        assert [port for port in (7100, 7180, RANK_PORT) if may_reach(variant, CLIENT, pod, port)] == []
    for pod in pods(variant):
        assert [port for port in (7100, 7180, RANK_PORT) if may_reach(variant, OPERATOR, pod, port)] == [7100]
        assert [port for port in (7100, 7180, RANK_PORT) if may_reach(variant, STRANGER, pod, port)] == []
        every = [*pod.container_ports().values(), RANK_PORT]
        scraped = [port for port in every if may_reach(variant, PROMETHEUS, pod, port, is_same_namespace=False)]
        assert scraped == [port for name, port in pod.container_ports().items() if name.endswith("http")]
        # A pod of another namespace is not a peer, even with the same labels.
        for other in pods(variant):
            assert not may_reach(variant, other.labels, pod, 7100, is_same_namespace=False)
        assert not may_reach(variant, CLIENT, pod, 7100, is_same_namespace=False)
        assert not may_call(variant, pod, STRANGER, 7100)
        is_traced = "tracing" in VARIANTS[variant][1]
        assert may_call(variant, pod, COLLECTOR, 4317, is_same_namespace=False) is is_traced
        assert may_call(variant, pod, STRANGER, 443) is bool({"s3-backup"} & set(VARIANTS[variant][1]))


@pods_and_variants()
def test_no_container_runs_as_root_or_writes_its_root_file_system(variant: str) -> None:
    for pod, container in containers(variant):
        rights = {**pod.spec["securityContext"], **container["securityContext"]}
        assert rights["runAsNonRoot"] is True and rights["runAsUser"] >= 10_000 and rights["runAsGroup"] >= 10_000
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert not rights.get("privileged")
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            assert not pod.spec.get(name)
        assert pod.spec["automountServiceAccountToken"] is False


@pods_and_variants()
def test_memory_is_pinned_only_where_rdma_needs_it(variant: str) -> None:
    """A non-root user gets a capability only from a file, so these containers run a copy of Python with IPC_LOCK."""
    for _, container in containers(variant):
        added = container["securityContext"]["capabilities"].get("add", [])
        is_rdma = variant in RDMA and role_of(container) is not None
        assert added == (["IPC_LOCK"] if is_rdma else [])
        assert container["securityContext"]["allowPrivilegeEscalation"] is is_rdma
        assert (container["command"][0] == "python-ipc-lock") is is_rdma
        devices = [name for name in container["resources"]["limits"] if re.search("rdma|efa", name)]
        assert len(devices) == int(is_rdma)


@pods_and_variants()
def test_only_empty_dir_volumes_are_writable(variant: str) -> None:
    for pod, container in containers(variant):
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        kinds = {volume["name"]: next(key for key in volume if key != "name") for volume in pod.spec["volumes"]}
        writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
        assert "/tmp" in writable  # sockets between a leader and its ranks
        assert {kinds[mounts[path]["name"]] for path in writable} == {"emptyDir"}
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        if role_of(container) is not None:
            assert writable == {"/tmp", "/dev/shm"}
    for pod in pods(variant):
        for volume in pod.spec["volumes"]:
            assert "hostPath" not in volume or "model-on-host" in VARIANTS[variant][1]
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"]
        (shm,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"


@pods_and_variants()
def test_a_node_has_the_time_to_drain(variant: str) -> None:
    for pod in pods(variant):
        for container in pod.nodes:
            (volume,) = [
                each["configMap"]["name"]
                for each in pod.spec["volumes"]
                for mount in container["volumeMounts"]
                if mount["name"] == each["name"] and mount["mountPath"] == "/etc/kvferry"
            ]
            (settings,) = [one["data"] for one in of_kind(variant, "ConfigMap") if one["metadata"]["name"] == volume]
            drain_s = yaml.safe_load(settings["settings.yaml"])["drain_timeout_s"]
            before_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert pod.spec["terminationGracePeriodSeconds"] >= before_s + drain_s + 2 * STOP_GRACE_S
            # Services remove an ending node late, so decode nodes wait before they drain. Prefill nodes notify their peers.
            assert (role_of(container) == "decode") <= (before_s > 0)


@pods_and_variants()
def test_images_have_this_version_and_every_container_has_requests(variant: str) -> None:
    """To change the version: `grep -rl OLD deploy/kubernetes | xargs sed -i s/OLD/NEW/`."""
    for pod, container in containers(variant):
        name, _, tag = container["image"].partition(":")
        is_gpu = VARIANTS[variant][0] != "dev-tcp"
        suffix = ("-cu13" if is_gpu else "") + ("-efa" if "efa" in VARIANTS[variant][1] else "")
        assert (name, tag) == ("kvferry", f"{transfer.__version__}{suffix}")
        rights = {**pod.spec["securityContext"], **container["securityContext"]}
        assert f"\nUSER {rights['runAsUser']}:{rights['runAsGroup']}\n" in DOCKERFILE
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_a_leader_names_as_many_workers_as_its_group_has() -> None:
    (groups,) = of_kind("lws", "LeaderWorkerSet")
    group = groups["spec"]["leaderWorkerTemplate"]
    (leader,) = [pod for pod in pods("lws") if pod.name == "kvferry-group-0"]
    (container,) = leader.nodes
    (named,) = [one["value"] for one in container["env"] if one["name"] == "KVFERRY_PEERS__PREFILL_NODES"]
    # LeaderWorkerSet names pods in its headless Service LEADER-WORKER.NAME.
    workers = [f"$(POD_NAME)-{worker}.{groups['metadata']['name']}:7100" for worker in range(1, group["size"])]
    assert named.split(",") == workers
    assert role_of(container) == "decode"
    assert [role_of(one) for pod in pods("lws") if pod.name != leader.name for one in pod.nodes] == ["prefill"]
    before = [one["name"] for one in container["env"]]
    assert before.index("POD_NAME") < before.index("KVFERRY_PEERS__PREFILL_NODES")


def test_single_node_meets_the_requirements_of_cuda_ipc() -> None:
    """Both containers share a pid namespace, a user and both GPUs. Each container computes on its own GPU."""
    (pod,) = pods("single-node")
    assert pod.spec["shareProcessNamespace"] is True
    assert [role_of(one) for one in pod.nodes] == ["decode", "prefill"]
    assert all("runAsUser" not in one["securityContext"] for one in pod.nodes)
    assert [one["resources"]["claims"] for one in pod.nodes] == [[{"name": "gpus"}]] * 2
    first = [one["value"] for each in pod.nodes for one in each["env"] if one["name"] == "KVFERRY_FIRST_DEVICE"]
    (claim,) = of_kind("single-node", "ResourceClaimTemplate")
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert sorted(map(int, first)) == list(range(request["exactly"]["count"]))


def test_every_manifest_is_in_its_kustomization() -> None:
    """The kustomization of each folder of deploy/kubernetes names all files of the folder."""
    for file in KUBERNETES.rglob("*.yaml"):
        folder = file.parent.parent if file.parent.name == "settings" else file.parent
        if file.name != "kustomization.yaml":
            assert file.relative_to(folder).as_posix() in (folder / "kustomization.yaml").read_text(encoding="utf-8"), file

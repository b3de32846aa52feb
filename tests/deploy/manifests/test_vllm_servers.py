"""The overlay of vLLM servers: connector and router accept their settings, names agree, and only the router reaches vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command

import transfer
from kvferry.__main__ import app
from kvferry.router.settings import router_settings
from tests.deploy.manifests.kustomize import Pod, matches, of_kind, pods, rendered
from tests.deploy.manifests.test_across_objects import BROUGHT, may_call, may_reach
from tests.deploy.manifests.vllm_servers import connector_config, option

CLIENT, STRANGER = {"kvferry-access": "client"}, {"app": "another"}


def pod_of(component: str) -> Pod:
    (found,) = [pod for pod in pods("vllm") if pod.labels["app.kubernetes.io/component"] == component]
    return found


def container_of(component: str) -> dict[str, Any]:
    (container,) = pod_of(component).spec["containers"]
    return container


def test_the_connectors_accept_their_settings_and_find_the_prefill_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = (connector_config(container_of(tier), monkeypatch) for tier in ("prefill", "decode"))
    for config in (prefill, decode):
        assert config.server.advertised_host == "10.1.2.3" and config.tls.is_set_up and not config.tls.insecure
    assert decode.discovery.dns_name == f"kvferry-prefill:{prefill.server.port}"
    assert prefill.tls.peer_names == ("decode.kvferry.internal",) and decode.tls.peer_names == ("prefill.kvferry.internal",)


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_a_server_has_a_gpu_for_each_rank_and_its_ports(tier: str) -> None:
    container = container_of(tier)
    assert option(container["args"], "--tensor-parallel-size") == container["resources"]["limits"]["nvidia.com/gpu"]
    ports = pod_of(tier).container_ports()
    assert option(container["args"], "--port") == str(ports["http"]) and ports["grpc"] == 7100


def test_the_router_calls_each_server_by_its_name() -> None:
    container = container_of("router")
    _, command = container["command"]
    route = get_command(app).get_command(None, command)  # type: ignore[attr-defined, arg-type]
    given = route.make_context(command, list(container["args"])).params
    names = ("prefill", "decode", "flow", "max_body", "max_body_total", "tokenizer", "model_name", "host", "port")
    router_settings(**{name: given[name] for name in names})
    assert given["port"] == pod_of("router").container_ports()["http"]
    sets = {one["metadata"]["name"]: one["spec"] for one in of_kind("vllm", "StatefulSet")}
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind("vllm", "Service")}
    for tier in ("prefill", "decode"):
        spec = sets[f"kvferry-{tier}"]
        service = services[spec["serviceName"]]
        assert service["clusterIP"] == "None" and matches({"matchLabels": service["selector"]}, pod_of(tier).labels)
        port = next(one["port"] for one in service["ports"] if one["name"] == "http")
        urls = [f"http://kvferry-{tier}-{index}.{spec['serviceName']}:{port}" for index in range(spec["replicas"])]
        assert list(given[tier]) == urls


def test_only_the_router_reaches_vllm_and_only_clients_reach_the_router() -> None:
    router = pod_of("router")
    for tier, other in (("prefill", "decode"), ("decode", "prefill")):
        pod = pod_of(tier)
        assert may_reach("vllm", router.labels, pod, 8000) and may_reach("vllm", pod_of(other).labels, pod, 43_210)
        assert not may_reach("vllm", CLIENT, pod, 8000) and not may_reach("vllm", STRANGER, pod, 7100)
        assert may_call("vllm", router, pod.labels, 8000) and not may_call("vllm", pod, STRANGER, 443)
    assert may_reach("vllm", CLIENT, router, 8000) and not may_reach("vllm", STRANGER, router, 8000)


def test_objects_that_pods_reference_exist_and_images_have_this_version() -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in rendered("vllm")}
    there |= {("Secret", one["spec"]["secretName"]) for one in of_kind("vllm", "Certificate")}
    there |= {(kind, name) for kind, names in BROUGHT.items() for name in names}
    for pod in pods("vllm"):
        assert ("ServiceAccount", pod.spec["serviceAccountName"]) in there
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        for volume in pod.spec["volumes"]:
            assert "secret" not in volume or ("Secret", volume["secret"]["secretName"]) in there
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or ("PersistentVolumeClaim", claim) in there
        for container in pod.spec["containers"]:
            name, _, tag = container["image"].partition(":")
            assert name in ("kvferry", "kvferry-vllm") and tag == transfer.__version__
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_namespace_is_created_and_everything_is_in_it() -> None:
    (namespace,) = of_kind("vllm-namespace", "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [one for one in rendered("vllm-namespace") if one["kind"] != "Namespace"]
    assert {one["metadata"]["namespace"] for one in others} == {namespace["metadata"]["name"]}

"""Who may call what: every method of every service that is served has its line in the table."""

from __future__ import annotations

from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

from transfer.pb import kvferry_pb2 as pb
from transfer.registry.guard import METHOD_ROLES, CallerRole

PEER, CLIENT = CallerRole.PEER, CallerRole.CLIENT


def test_every_method_has_its_roles() -> None:
    """A new one that has none is refused to everybody; this says so before anybody finds out."""
    files = (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(METHOD_ROLES) == methods
    assert all(METHOD_ROLES.values())


def test_what_tiers_say_to_each_other_is_not_for_clients() -> None:
    for method in ("PrefillControl/Join", "PrefillControl/Prefill", "PrefillControl/StreamPrompts", "DecodeControl/Reserve"):
        assert METHOD_ROLES[f"/kvferry.v1.{method}"] == {PEER}
    transfer = pb.DESCRIPTOR.services_by_name["TransferControl"]
    assert all(METHOD_ROLES[f"/{transfer.full_name}/{method.name}"] == {PEER} for method in transfer.methods)


def test_what_operators_do_is_not_for_peers() -> None:
    for node in ("PrefillControl", "DecodeControl"):
        for method in ("Status", "Drain"):
            assert METHOD_ROLES[f"/kvferry.v1.{node}/{method}"] == {CLIENT}
    operators = pb.DESCRIPTOR.services_by_name["NodeControl"]
    for one in operators.methods:  # how a node is, is shown on its peers' pages
        assert METHOD_ROLES[f"/{operators.full_name}/{one.name}"] == ({PEER, CLIENT} if one.name == "Status" else {CLIENT})
    assert METHOD_ROLES["/kvferry.v1.DecodeControl/Generate"] == {CLIENT}
    assert METHOD_ROLES["/kvferry.v1.DecodeControl/Abort"] == {CLIENT}

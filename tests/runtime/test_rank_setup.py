"""What a rank says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_runtime.rank_setup import own_instance
from tests.runtime.instances import LAYOUT
from transfer.instance import CAPABILITIES, check_compatible
from transfer.layout import KVLayout, Shard
from transfer.messages import PROTOCOL_VERSION
from transfer.transport.inproc import InprocHub, InprocTransport


@dataclass
class NoEngine:
    layout: KVLayout = LAYOUT
    shard: Shard = field(default_factory=Shard)
    model_fields: dict[str, str] = field(default_factory=dict)


def test_two_ranks_of_this_version_fit_and_tell_every_capability() -> None:
    transport = InprocTransport(InprocHub())
    ours, theirs = (own_instance(NoEngine(), transport, incarnation=life, device_type="cpu") for life in (1, 2))
    assert check_compatible(ours, theirs).protocol_version == PROTOCOL_VERSION
    assert ours.capabilities == theirs.capabilities == CAPABILITIES
    assert {"layer_groups", "resend_once", "selective_release"} == CAPABILITIES

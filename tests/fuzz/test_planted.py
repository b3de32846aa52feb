"""The fuzzing is not blind: a fault that is planted in what a target reads is found soon, by the target's mutators alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml

from embedded_engine import model_files
from fuzz.plain import search
from fuzz.target import NAMES, load
from fuzz.targets import messages, nixl_metadata, plan_flags, settings, stored_page
from kvferry.plan.options import PlanOptions
from node_runtime.rank_link import RankCodec
from planner.config_fields import ConfigFields
from planner.plan_inputs import Policy
from transfer.config import NodeConfig
from transfer.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from transfer.load_config import load_config
from transfer.messages import MESSAGE_TYPES, Message
from transfer.registry import convert
from transfer.ring import RingView, StagingAllocator, grant_key
from transfer.send.state import PiecesUnderWay, SessionState
from transfer.storage import envelope
from transfer.storage.base import Outcome
from transfer.transport import cuda_ipc_blob
from transfer.transport.nixl_metadata import Region
from transfer.transport.ucx_address import AddressCheck

EXECUTIONS = 4000


def unchecked_fields(payload: bytes, honest: Callable[[bytes], Message] = messages.decode) -> Message:
    try:
        return honest(payload)
    except RemoteProtocolError as error:
        for kind in MESSAGE_TYPES:
            if str(error).startswith(f"{kind.__name__}."):  # a field of it is wrong
                return kind.model_construct(**dict(zip(kind.model_fields, msgpack.unpackb(payload)[2:], strict=False)))
        raise


def walk_over_the_end(
    self: AddressCheck, address: bytes, *, honest: Callable[..., None] = AddressCheck.check, **versions: str
) -> None:
    for behind in range(3):
        try:
            return honest(self, address + b"\x80" * behind, **versions)
        except ConfigError as error:
            refusal = error
    raise refusal


def metadata_of_any_memory(
    metadata: bytes, region: Region, *, honest: Callable[..., None] = nixl_metadata.check_metadata, **more: Any
) -> None:
    try:
        told = nixl_metadata.unpacked(metadata)[10]
    except ValueError:
        told = b""
    numbers = [int.from_bytes(told[at : at + 8], "little") for at in (0, 8, 16)]
    honest(metadata, Region(address=numbers[0], num_bytes=numbers[1], device_index=numbers[2], is_device=False), **more)


def pages_of_any_length(key: str, header: bytes, page: memoryview, *, num_bytes: int) -> Outcome:
    return envelope.check(key, header, page, num_bytes=max(num_bytes, len(header) + page.nbytes))


def trusted_link(self: RankCodec, payload: bytes, honest: Callable[..., Any] = RankCodec.decode) -> Any:
    try:
        return honest(self, payload)
    except LocalProtocolError:
        return msgpack.unpackb(payload, strict_map_key=False)


def settings_that_are_no_mapping(config_type: type[NodeConfig], *, file: Path, **more: Any) -> NodeConfig:
    content = yaml.safe_load(file.read_text()) or {}
    return load_config(config_type, given={"file": dict(content.items())}, **more)


def unchecked_policy(options: PlanOptions, *rest: Any, honest: Callable[..., Any] = plan_flags.make_plan_for) -> Any:
    return honest(replace(options, policy=Policy(options.policy)), *rest)


# What a target reads with, and what takes its place. The last three are faults of rules, and not of checks: what a request that
# was given up still holds is given back too early, or never.
PLANTS: dict[str, tuple[str, object, str, object]] = {
    "a message is built of whatever the wire says": ("messages", messages, "decode", unchecked_fields),
    "endless names": ("registry", convert, "MAX_NAMES", 1 << 62),
    "fields of any type": ("handshake", cuda_ipc_blob, "field_of", lambda fields, name, kind: fields.get(name)),
    "an address that breaks off is read on": ("ucx_address", AddressCheck, "check", walk_over_the_end),
    "the memory that the metadata describes": ("nixl_metadata", nixl_metadata, "check_metadata", metadata_of_any_memory),
    "pages of any length": ("stored_page", stored_page, "check", pages_of_any_length),
    "what is no message is handed over": ("rank_link", RankCodec, "decode", trusted_link),
    "settings that are no mapping": ("settings", settings, "load_config", settings_that_are_no_mapping),
    "counts without a bound": (
        "model_config",
        ConfigFields,
        "count",
        lambda self, name, absent=-1, **_: self.values.get(name, absent),
    ),
    "an index that is no object": ("weight_files", model_files, "read_json", lambda path, hint="": json.loads(path.read_bytes())),
    "a choice that there is not": ("plan_flags", plan_flags, "make_plan_for", unchecked_policy),
    "any grant is one of the ring": ("sender", RingView, "can_hold", lambda self, grant, num_bytes: True),
    "receives are posted early": ("receiver", StagingAllocator, "blocker_of", lambda self, grant: None),
    "places are kept": ("sender", PiecesUnderWay, "free", lambda self, piece: setattr(piece, "place", None)),
    "a declined second attempt is forgotten": (
        "sender",
        SessionState,
        "is_taken",
        lambda self, begin: begin in self.held or grant_key(begin, attempt=0) in self.spent,
    ),
    "bytes are released too early": ("receiver", StagingAllocator, "quarantine", StagingAllocator.release),
}


def test_every_target_has_a_planted_fault() -> None:
    assert {name for name, *_ in PLANTS.values()} == set(NAMES)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the seeds alone, which are all honest: what is found is the mutators' doing, and the corpus's no more."""
    name, owner, attribute, wrong = PLANTS[plant]
    target = load(name)
    monkeypatch.setattr(owner, attribute, wrong)
    found = search(target, executions=EXECUTIONS, inputs=target.seeds())
    assert found is not None, f"{name}: nothing found in {EXECUTIONS} executions"
    print(f"{name}: found after {found.after} executions: {type(found.error).__name__}: {found.error!s:.200}")

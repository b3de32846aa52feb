"""The fuzzing is not blind: a fault that is planted in what a target reads is found soon, by the target's mutators alone."""

from __future__ import annotations

import json
import subprocess
import sys
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
from node_runtime.rank_link import RankCodec
from prefill_node.sender_state import SessionState, StagingSlots
from transfer.config import NodeConfig
from transfer.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from transfer.memory.config_fields import ConfigFields
from transfer.memory.plan_inputs import Policy
from transfer.messages import MESSAGE_TYPES, Message
from transfer.registry import convert
from transfer.ring import RingView, StagingAllocator, grant_key
from transfer.storage import envelope
from transfer.transport import cuda_ipc_blob
from transfer.transport.nixl_metadata import Region
from transfer.transport.ucx_address import AddressCheck

EXECUTIONS = 4000

Plant = Callable[[pytest.MonkeyPatch], None]


def unchecked_fields(patch: pytest.MonkeyPatch) -> None:
    """A control message is built of whatever the wire says."""
    honest = messages.decode

    def decode(payload: bytes) -> Message:
        try:
            return honest(payload)
        except RemoteProtocolError as error:
            for kind in MESSAGE_TYPES:
                if str(error).startswith(f"{kind.__name__}."):  # a field of it is wrong
                    return kind.model_construct(**dict(zip(kind.model_fields, msgpack.unpackb(payload)[2:], strict=False)))
            raise

    patch.setattr(messages, "decode", decode)


def endless_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(convert, "MAX_NAMES", 1 << 62)


def fields_of_any_type(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_ipc_blob, "field_of", lambda fields, name, kind: fields.get(name))


def walk_over_the_end(patch: pytest.MonkeyPatch) -> None:
    """An address that breaks off is read as if it went on."""
    honest = AddressCheck.check

    def check(self: AddressCheck, address: bytes, *, peer: str, own: str) -> None:
        for behind in range(3):
            try:
                return honest(self, address + b"\x80" * behind, peer=peer, own=own)
            except ConfigError as error:
                refusal = error
        raise refusal

    patch.setattr(AddressCheck, "check", check)


def metadata_of_any_memory(patch: pytest.MonkeyPatch) -> None:
    """The memory is taken to be the one that the metadata describes."""
    honest = nixl_metadata.check_metadata

    def check(metadata: bytes, region: Region, **more: Any) -> None:
        try:
            told = nixl_metadata.unpacked(metadata)[10]
        except ValueError:
            told = b""
        numbers = [int.from_bytes(told[at : at + 8], "little") for at in (0, 8, 16)]
        honest(metadata, Region(address=numbers[0], num_bytes=numbers[1], device_index=numbers[2], is_device=False), **more)

    patch.setattr(nixl_metadata, "check_metadata", check)


def pages_of_any_length(patch: pytest.MonkeyPatch) -> None:
    """What a header says of its page's length is not compared with the page that is there."""
    honest = envelope.check
    patch.setattr(
        stored_page,
        "check",
        lambda key, header, page, *, num_bytes: honest(key, header, page, num_bytes=max(num_bytes, len(header) + page.nbytes)),
    )


def trusted_link(patch: pytest.MonkeyPatch) -> None:
    """What is no message of the link is handed over as it is."""
    honest = RankCodec.decode

    def decode(self: RankCodec, payload: bytes) -> Any:
        try:
            return honest(self, payload)
        except LocalProtocolError:
            return msgpack.unpackb(payload, strict_map_key=False)

    patch.setattr(RankCodec, "decode", decode)


def settings_that_are_no_mapping(patch: pytest.MonkeyPatch) -> None:
    honest = settings.load_config

    def load_config(config_type: type[NodeConfig], *, file: Path, **more: Any) -> NodeConfig:
        content = yaml.safe_load(file.read_text()) or {}
        return honest(config_type, given={"file": dict(content.items())}, **more)

    patch.setattr(settings, "load_config", load_config)


def counts_without_a_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConfigFields, "count", lambda self, name, absent=-1, **_: self.values.get(name, absent))


def index_that_is_no_object(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_files, "read_json", lambda path, hint="": json.loads(path.read_bytes()))


def choices_unchecked(patch: pytest.MonkeyPatch) -> None:
    honest = plan_flags.make_plan_for
    patch.setattr(
        plan_flags, "make_plan_for", lambda options, *rest: honest(replace(options, policy=Policy(options.policy)), *rest)
    )


def grants_anywhere(patch: pytest.MonkeyPatch) -> None:
    """The writer takes any grant for one that the ring can give."""
    patch.setattr(RingView, "can_hold", lambda self, grant, num_bytes: True)


def receives_posted_early(patch: pytest.MonkeyPatch) -> None:
    """The target takes every grant for writable."""
    patch.setattr(StagingAllocator, "blocker_of", lambda self, grant: None)


PLANTS: dict[str, Plant] = {
    "messages": unchecked_fields,
    "registry": endless_names,
    "handshake": fields_of_any_type,
    "ucx_address": walk_over_the_end,
    "nixl_metadata": metadata_of_any_memory,
    "stored_page": pages_of_any_length,
    "rank_link": trusted_link,
    "settings": settings_that_are_no_mapping,
    "model_config": counts_without_a_bound,
    "weight_files": index_that_is_no_object,
    "plan_flags": choices_unchecked,
    "sender": grants_anywhere,
    "receiver": receives_posted_early,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the seeds alone, which are all honest: what is found is the mutators' doing, and the corpus's no more."""
    target = load(name)
    PLANTS[name](monkeypatch)
    found = search(target, executions=EXECUTIONS, inputs=target.seeds())
    assert found is not None, f"{name}: nothing found in {EXECUTIONS} executions"
    print(f"{name}: found after {found.after} executions: {type(found.error).__name__}: {found.error!s:.200}")


# Faults of rules, and not of checks: what a request that was given up still holds is given back too early, or never.


@pytest.mark.parametrize(
    ("name", "owner", "method", "wrong"),
    [
        ("sender", StagingSlots, "free", lambda self, piece: setattr(piece, "slot", None)),
        ("sender", SessionState, "is_taken", lambda self, begin: begin in self.held or grant_key(begin, attempt=0) in self.spent),
        ("receiver", StagingAllocator, "quarantine", StagingAllocator.release),
    ],
    ids=["slots are kept", "a second attempt that was declined is forgotten", "bytes are free too early"],
)
def test_a_protocol_that_is_wrong_in_one_way_is_found(
    name: str, owner: type, method: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, wrong)
    target = load(name)
    assert search(target, executions=EXECUTIONS, inputs=target.seeds()) is not None


SOME_INPUTS = """
import hashlib, random
from fuzz.target import load
target, rng, seen = load("registry"), random.Random(0), hashlib.sha256()
for data in target.seeds() * 40:
    for _ in range(4):
        data = target.mutate(data, rng)
        seen.update(data)
print(seen.hexdigest())
"""


def test_the_same_seed_makes_the_same_inputs_in_another_process() -> None:
    """A map of protobuf has another order in each process."""
    made = {
        subprocess.run([sys.executable, "-c", SOME_INPUTS], capture_output=True, text=True, timeout=60, check=True).stdout
        for _ in range(2)
    }
    assert len(made) == 1

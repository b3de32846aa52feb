"""The fuzzing is not blind: a fault that is planted in what a target reads is found soon, by the target's mutators alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import yaml

from decode_node.receiver import Receiver
from fuzz.plain import search
from fuzz.target import NAMES, load
from fuzz.targets import stored_page
from kvferry import plan_options
from node_runtime.rank_link import RankCodec
from prefill_node.sender_state import SessionState
from transfer import load_config, messages
from transfer.memory.config_fields import ConfigFields
from transfer.registry import convert
from transfer.ring import RingView, grant_key
from transfer.storage import envelope
from transfer.transport import cuda_ipc_blob, nixl_metadata, ucx_address

EXECUTIONS = 4000

Plant = Callable[[pytest.MonkeyPatch], None]


def unchecked_fields(patch: pytest.MonkeyPatch) -> None:
    """A control message is built of whatever the wire says."""
    for codec in messages._CODECS.values():
        patch.setattr(codec, "_validate", lambda fields, made=codec._type: made.model_construct(**fields))


def endless_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(convert, "_check_count", lambda name, count, most: None)


def fields_of_any_type(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_ipc_blob, "field_of", lambda fields, name, kind: fields.get(name))


def walk_over_the_end(patch: pytest.MonkeyPatch) -> None:
    def skip(self: Any, num_bytes: int) -> bytes:
        begin, self._place = self._place, min(self._place + num_bytes, len(self._address))
        return bytes(self._address[begin : begin + num_bytes]) or b"\x80"

    patch.setattr(ucx_address._Walk, "skip", skip)


def fields_without_an_end(patch: pytest.MonkeyPatch) -> None:
    def walk(metadata: bytes, tags: tuple[bytes, ...], begin: int) -> tuple[list[bytes], int]:
        values, at = [], begin
        for tag in tags:
            if not metadata.startswith(tag, at):
                raise nixl_metadata.MalformedMetadata("another field")
            at += len(tag) + 8
            end = at + int.from_bytes(metadata[at - 8 : at], "little")
            values.append(metadata[at:end])
            at = min(end + 1, len(metadata))
        return values, at

    patch.setattr(nixl_metadata, "_walk", walk)


def pages_of_any_length(patch: pytest.MonkeyPatch) -> None:
    """What a header says of its page's length is not compared with the page that is there."""
    honest = envelope.check
    patch.setattr(
        stored_page,
        "check",
        lambda key, header, page, *, num_bytes: honest(key, header, page, num_bytes=max(num_bytes, len(header) + page.nbytes)),
    )


def trusted_link(patch: pytest.MonkeyPatch) -> None:
    def decode(self: Any, payload: bytes) -> Any:
        name, fields = msgpack.unpackb(payload, strict_map_key=False)
        return self._adapters[name].validate_python(fields)

    patch.setattr(RankCodec, "decode", decode)


def settings_that_are_no_mapping(patch: pytest.MonkeyPatch) -> None:
    def settings(file: Any, problems: list[str]) -> list[tuple[str, object]]:
        return list(load_config._leaves(yaml.load(file.read_text(), Loader=load_config._StrictLoader), ""))

    patch.setattr(load_config, "_file_settings", settings)


def counts_without_a_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConfigFields, "count", lambda self, name, absent=-1, **_: self.values.get(name, absent))


def index_that_is_no_object(patch: pytest.MonkeyPatch) -> None:
    from embedded_engine import model_files

    patch.setattr(model_files, "read_json", lambda path, hint="": json.loads(path.read_bytes()))


def choices_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan_options, "_choice", lambda name, value, choices: choices(value))


def grants_anywhere(patch: pytest.MonkeyPatch) -> None:
    """The writer takes any grant for one that the ring can give."""
    patch.setattr(RingView, "can_hold", lambda self, grant, num_bytes: True)


def chunks_of_any_size(patch: pytest.MonkeyPatch) -> None:
    """The target grants chunks that its request does not have."""
    patch.setattr(Receiver, "_problem_of", lambda self, request, message: None)


PLANTS: dict[str, Plant] = {
    "messages": unchecked_fields,
    "registry": endless_names,
    "handshake": fields_of_any_type,
    "ucx_address": walk_over_the_end,
    "nixl_metadata": fields_without_an_end,
    "stored_page": pages_of_any_length,
    "rank_link": trusted_link,
    "settings": settings_that_are_no_mapping,
    "model_config": counts_without_a_bound,
    "weight_files": index_that_is_no_object,
    "plan_flags": choices_unchecked,
    "sender": grants_anywhere,
    "receiver": chunks_of_any_size,
}


def test_every_target_has_a_planted_fault() -> None:
    assert set(PLANTS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the seeds alone, which are all honest: what is found is the mutators' doing, and the corpus's no more."""
    target = load(name)
    PLANTS[name](monkeypatch)
    found = search(target, executions=EXECUTIONS, inputs=target.seeds())
    assert found is not None, f"{name}: nothing found in {EXECUTIONS} executions"
    print(f"{name}: found after {found.after} executions: {type(found.error).__name__}: {found.error!s:.200}")


@pytest.mark.parametrize("name", ["sender", "receiver"])
def test_a_protocol_that_is_wrong_in_one_way_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of rules, and not of checks: what a request that was given up still holds is given back too early, or never."""
    target = load(name)
    if name == "sender":
        from prefill_node.sender import Sender

        monkeypatch.setattr(Sender, "_let_go", lambda self, piece: None)
    else:
        honest = Receiver._release
        monkeypatch.setattr(
            Receiver,
            "_on_writer_drained",
            lambda self, session, message: [
                honest(self, piece) for piece in list(self._live.values()) if piece.route.session == session
            ],
        )
    assert search(target, executions=EXECUTIONS, inputs=target.seeds()) is not None


def test_two_messages_about_one_key_meet_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender takes a grant whose second attempt was declined: it needs a rejection and a grant at one position."""
    monkeypatch.setattr(
        SessionState, "is_taken", lambda self, begin: begin in self.held or grant_key(begin, attempt=0) in self.spent
    )
    target = load("sender")
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
        for _ in range(3)
    }
    assert len(made) == 1

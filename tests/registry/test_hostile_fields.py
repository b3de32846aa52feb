"""Every call of every service with every field as no honest peer has it: a clear status in one line, and the node serves on.

The servicers are the nodes' own, behind real gRPC servers; what is not there are the ranks' processes.
"""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import transfer
from decode_node.node import DecodeNode
from node_runtime.daemon import Daemon, NodeState
from node_runtime.rank_link import RankCodec
from node_runtime.rank_port_service import RankPort
from prefill_node.node import PrefillNode
from tests.registry.attaches import attach_request
from tests.registry.hostile_messages import HUGE_LIST, HUGE_TEXT, Hostile, hostile_messages
from tests.registry.loop_errors import record_loop_errors
from tests.runtime.instances import decode_config, hello, instance, prefill_config
from transfer.chunk import ChunkPlan
from transfer.config import ServerConfig
from transfer.connector.messages import AttachDecode, DecodeAttached
from transfer.errors import PeerUnreachable, RemoteProtocolError
from transfer.instance import Instance
from transfer.layout import DType, Shard
from transfer.logs import log_level
from transfer.metrics import RankMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive.attach import PrefillSessions, Receiving
from transfer.registry.convert import attach_request_to_proto, chunk_plan_to_proto, instance_to_proto, layout_from_proto
from transfer.registry.security import PlainText
from transfer.registry.server import RegistryServer, serve
from transfer.ring import StagingAllocator
from transfer.transport.inproc import InprocHub, InprocOffer, InprocTransport

DAEMON = cast(
    Daemon,
    SimpleNamespace(
        state=NodeState.READY,
        num_restarts=0,
        started_s=0.0,
        http_port=0,
        is_stopping=False,
        other_config=None,
        incarnation=7,
        readiness=lambda: SimpleNamespace(is_ready=True, reason=""),
        readiness_changed=lambda: None,
    ),
)
PREFILL_LIFE, DECODE_LIFE, JOINED_LIFE = 11, 22, 33
PLAN = ChunkPlan(chunk_tokens=16)
RING_BYTES = 1 << 16
NOWHERE = "127.0.0.1:1"
CALL_S = 60.0
TAKEN_BYTES, TAKEN_PER_BYTE = 4 << 20, 24
SESSION = 77

Code = grpc.StatusCode
REFUSED = {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """One method: an honest request with something in every field, and what it may end in when a field is not honest.

    Args:
        codes: Beside `REFUSED` and OK: what the method says of what is right and not known here, see docs/protocol.md.
        needs_session: Whether there has to be a session `SESSION`.
        empty: Fields that are empty where the request is honest.
    """

    method: str
    request: Callable[[Nodes], Any]
    codes: set[grpc.StatusCode] = field(default_factory=set)
    needs_session: bool = False
    empty: set[str] = field(default_factory=set)


class Prefill(PrefillNode):
    """Its only rank attaches at once."""

    complaints: list[dict[str, Any]]

    def broadcast(self, message: object) -> None:
        if isinstance(message, AttachDecode):
            answer = DecodeAttached(join=message.join, incarnation=message.instance.incarnation, links=(), ring_bytes=RING_BYTES)
            asyncio.get_running_loop().call_soon(self.ranks.on_message, 0, answer)

    def lose(self, reason: str) -> None:
        self.complaints.append({"message": reason})


class Decode(DecodeNode):
    complaints: list[dict[str, Any]]

    def lose(self, reason: str) -> None:
        self.complaints.append({"message": reason})


class Nodes:
    """Both leaders and a decode rank's `TransferControl`, each behind a server of its own."""

    def __init__(self, folder: Path) -> None:
        Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
        self.complaints = record_loop_errors()
        self.prefill = Prefill(DAEMON, prefill_config(folder, transport={"name": "inproc"}))
        self.decode = Decode(DAEMON, decode_config(folder, transport={"name": "inproc"}))
        self.prefill.complaints = self.decode.complaints = self.complaints
        self.hub = InprocHub()
        self.offers: list[InprocOffer] = []  # one that is dropped cannot be accepted
        self.rank = self._rank()
        self.port = RankPort(
            instance="engine",
            num_ranks=2,
            codec=RankCodec(),
            server=ServerConfig(),
            why_not=lambda rank: "",
            on_misfit=lambda reason: None,
        )
        self.servers: list[RegistryServer] = []
        self.channels: dict[str, grpc.aio.Channel] = {}

    def offer(self) -> bytes:
        self.offers.append(InprocTransport(self.hub, one_sided=True).offer())
        return self.offers[-1].blob

    def _accept(self, transport: InprocTransport, blob: bytes, memory: Any) -> Any:
        """An offer is accepted once; here the honest one is as good as new each time."""
        return transport.accept(self.offer() if any(blob == offer.blob for offer in self.offers) else blob, memory)

    def _rank(self) -> PrefillSessions:
        """A decode rank, as far as an attach goes."""
        transport = InprocTransport(self.hub, one_sided=True)
        return PrefillSessions(
            context=RankContext(
                loop=asyncio.get_running_loop(),
                instance=instance(DECODE_LIFE, capabilities=frozenset({"attention_in_keys"})),
                rank=0,
                device=torch.device("cpu"),
                transport=cast(Any, SimpleNamespace(accept=partial(self._accept, transport), is_one_sided=True)),
                security=PlainText(insecure=1),
                metrics=RankMetrics(role="decode", rank=0),
                on_crash=pytest.fail,
            ),
            receiving=Receiving(
                loop=cast(
                    Any,
                    SimpleNamespace(
                        ring=StagingAllocator(RING_BYTES, incarnation=DECODE_LIFE),
                        memory=transport.register(StagingBuffer(num_bytes=RING_BYTES).tensor),
                        copier=AsyncMock(),  # its warm_up() does nothing
                        driver=SimpleNamespace(add=lambda session: None),
                        sessions_in_use=frozenset,
                        open_session=lambda number, session, **values: None,
                        watch_sessions=self._watch_sessions,
                        close_session=lambda session, reason: self.on_session_closed(session, reason),
                        num_ending=0,
                    ),
                ),
                control=cast(Any, SimpleNamespace(address="inproc", local_address="", public_key=bytes(32))),
                scratch=None,
            ),
            server=ServerConfig(),
            heartbeat_s=10.0,
            on_writer_lost=lambda *loss: None,
            on_link_probed=lambda link: None,
        )

    async def open(self) -> None:
        await self.prefill.begin_life((hello(0, incarnation=PREFILL_LIFE),))
        await self.decode.begin_life((hello(0, incarnation=DECODE_LIFE),))
        await self.serve(self.prefill, self.decode, self.decode)
        request = pb.JoinRequest(
            decode=instance_to_proto(instance(JOINED_LIFE)), decode_address=NOWHERE, rank_addresses=[NOWHERE], heartbeat_s=10.0
        )
        stub: Any = pb_grpc.PrefillControlStub(self.channels["PrefillControl"])
        self.joined = stub.Join(request)
        assert (await self.joined.read()).WhichOneof("event") == "joined"

    async def serve(self, prefill_control: Any, decode_control: Any, node_control: Any = None) -> None:
        """Each service behind a server and a channel of its own."""
        addresses = {"TransferControl": await self.rank.start()}
        for name, services in (
            ("PrefillControl", {"prefill_control": prefill_control}),
            ("DecodeControl", {"decode_control": decode_control}),
            ("NodeControl", {"node_control": node_control}),
            ("RankControl", {"rank_control": self.port}),
        ):
            self.servers.append(await serve("127.0.0.1", 0, **cast(Any, services)))
            addresses[name] = self.servers[-1].address
        for name, address in addresses.items():
            self.channels[name] = grpc.aio.insecure_channel(
                address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            )

    async def close_servers(self) -> None:
        for channel in self.channels.values():
            await channel.close()
        for server in self.servers:
            await server.close()
        await self.rank.close("the test is over")
        await self.port.close()

    def _watch_sessions(self, on_closed: Callable[[int, str], None], publish: object) -> None:
        self.on_session_closed = on_closed

    async def close(self) -> None:
        await self.prefill.end_life(PeerUnreachable("the test is over"))
        await self.decode.end_life(PeerUnreachable("the test is over"))
        await self.close_servers()

    async def call(self, rpc: Rpc, payload: bytes) -> tuple[grpc.StatusCode, str]:
        """How a call with these bytes ends. A stream is served if it answers, or goes on until its writer ends it."""
        self.on_session_closed(SESSION, "the next call begins")
        if rpc.needs_session:
            assert (await self.call(RPCS["Attach"], attach(self).SerializeToString()))[0] is Code.OK
        service, _, name = rpc.method.partition(".")
        found = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        path, channel = f"/{found.containing_service.full_name}/{name}", self.channels[service]
        is_answered = asyncio.Event()
        try:
            async with asyncio.timeout(CALL_S):
                if found.client_streaming:
                    call = channel.stream_stream(path)(held(payload, is_answered))
                    while (answer := await call.read()) is not grpc.aio.EOF:
                        is_answered.set()
                        if name == "StreamPrompts" and (status := pb.PromptEvent.FromString(answer).status).code:
                            return next(code for code in Code if code.value[0] == status.code), status.details
                elif found.server_streaming:
                    call = channel.unary_stream(path)(payload)
                    await call.read()
                else:
                    await channel.unary_unary(path)(payload)
                    return Code.OK, ""
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            is_served = found.client_streaming and details.endswith("the writer's stream ended")
            return (Code.OK, "") if is_served else (error.code(), details)
        finally:
            is_answered.set()  # a stream that is refused has its writer end, too
        if call.done():
            return await call.code(), await call.details() or ""
        call.cancel()
        return Code.OK, ""

    async def are_serving(self) -> None:
        """Both leaders and the rank answer what is honest."""
        for method in ("PrefillControl.Status", "DecodeControl.Status"):
            assert (await self.call(Rpc(method=method, request=beat), b""))[0] is Code.OK
        assert (await self.call(RPCS["Watermarks"], beat(self).SerializeToString()))[0] is Code.OK
        assert self.complaints == []


async def held(payload: bytes, is_answered: asyncio.Event) -> AsyncIterator[bytes]:
    """A stream that its writer ends once it is answered."""
    yield payload
    await is_answered.wait()


def told(incarnation: int, tp_size: int = 1) -> Instance:
    """An instance with something in every field."""
    shard = Shard(tp_size=tp_size, dtype=DType.FLOAT8_E4M3, stage_layers=(2,))
    plain = instance(incarnation)
    return replace(
        plain,
        shard=shard,
        kv_scales=((0.5, 2.0), (1.0, 1.0)),
        capabilities=frozenset({"layer_groups", "attention_in_keys"}),
        version="1",
        attention="xattention",
    )


def join(_: Nodes) -> pb.JoinRequest:
    return pb.JoinRequest(
        decode=instance_to_proto(told(55)),
        decode_address=NOWHERE,
        rank_addresses=["127.0.0.1:2"],
        heartbeat_s=0.5,
        prefill_address=NOWHERE,
    )


def attach(nodes: Nodes) -> pb.AttachRequest:
    request = attach_request(told(44, tp_size=2), prefill_rank=1, offer=nodes.offer(), chunk_plan=PLAN)
    return attach_request_to_proto(request)


def sampling() -> pb.SamplingParams:
    return pb.SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=7)


def prefill(_: Nodes) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        request_id="a.1",
        token_ids=[1, 2, 3],
        start_token=1,
        decode_incarnation=JOINED_LIFE,
        sampling=sampling(),
        cache_salt="t",
        early_room_plan=pb.ChunkPlanInfo(chunk_tokens=128),
    )


def prefill_message(nodes: Nodes) -> pb.PrefillMessage:
    message = pb.PrefillMessage(request=prefill(nodes))
    message.request.ClearField("early_room_plan")  # with it, the node says nothing until it has the room
    return message


def prompt_message(nodes: Nodes) -> pb.PromptMessage:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    return pb.PromptMessage(prompt=1, message=prefill_message(nodes), traceparent=traceparent)


def generate(_: Nodes) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="a",
        token_ids=pb.TokenIds(ids=[1, 2]),
        max_new_tokens=4,
        sampling=sampling(),
        stop_token_ids=[3],
        ignore_eos=True,
        cache_salt="t",
    )


def generate_text(_: Nodes) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="a", prompt="a a", max_new_tokens=4)


def reserve(_: Nodes) -> pb.ReserveRequest:
    return pb.ReserveRequest(
        request_id="a.1", prefill_incarnation=PREFILL_LIFE, decode_incarnation=DECODE_LIFE, chunk_plan=chunk_plan_to_proto(PLAN)
    )


def abort(_: Nodes) -> pb.AbortRequest:
    return pb.AbortRequest(request_id="a", reason="no")


def beat(_: Nodes) -> pb.WriterBeat:
    link = pb.LinkStatus(prefill_rank=1, decode_rank=1, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    return pb.WriterBeat(session_id=SESSION, link=link, idle_heartbeat_s=0.5, wants_probe_turn=True)


def meet(_: Nodes) -> pb.MeetRequest:
    return pb.MeetRequest(version=transfer.__version__, instance="engine", rank=1, control_key=bytes(range(32)))


RPCS = {
    "Join": Rpc(method="PrefillControl.Join", request=join),
    "Prefill": Rpc(method="PrefillControl.Prefill", request=prefill, codes={Code.UNAVAILABLE}, empty={"engine_request"}),
    "PrefillIntoRoom": Rpc(
        method="PrefillControl.PrefillIntoRoom", request=prefill_message, codes={Code.UNAVAILABLE, Code.ABORTED}
    ),
    "StreamPrompts": Rpc(method="PrefillControl.StreamPrompts", request=prompt_message, codes={Code.UNAVAILABLE, Code.ABORTED}),
    "prefill's Abort": Rpc(method="PrefillControl.Abort", request=abort),
    "prefill's Status": Rpc(method="PrefillControl.Status", request=lambda _: pb.StatusRequest()),
    "Generate": Rpc(method="DecodeControl.Generate", request=generate, codes={Code.UNAVAILABLE}),
    "Generate of text": Rpc(method="DecodeControl.Generate", request=generate_text, codes={Code.UNAVAILABLE}),
    "Reserve": Rpc(method="DecodeControl.Reserve", request=reserve, codes={Code.UNAVAILABLE, Code.NOT_FOUND}),
    "decode's Abort": Rpc(method="DecodeControl.Abort", request=abort),
    "decode's Status": Rpc(method="DecodeControl.Status", request=lambda _: pb.StatusRequest()),
    "Attach": Rpc(method="TransferControl.Attach", request=attach),
    "Watermarks": Rpc(
        method="TransferControl.Watermarks", request=beat, codes={Code.NOT_FOUND, Code.UNAVAILABLE}, needs_session=True
    ),
    "Meet": Rpc(method="RankControl.Meet", request=meet, codes={Code.UNAVAILABLE}),
    "ListRequests": Rpc(method="NodeControl.ListRequests", request=lambda _: pb.ListRequestsRequest(limit=5)),
    "Abort": Rpc(method="NodeControl.Abort", request=abort),
    "Status": Rpc(method="NodeControl.Status", request=lambda _: pb.StatusRequest()),
    "SetLogLevel": Rpc(method="NodeControl.SetLogLevel", request=lambda _: pb.SetLogLevelRequest(level=log_level())),
    "SwitchRole": Rpc(
        method="NodeControl.SwitchRole",
        request=lambda _: pb.SwitchRoleRequest(role="decode", drain_budget_s=1.0),
        codes={Code.FAILED_PRECONDITION},
    ),
    "Undrain": Rpc(method="NodeControl.Undrain", request=lambda _: pb.UndrainRequest()),
    # Last, for they take no more requests after it.
    "Drain": Rpc(method="NodeControl.Drain", request=lambda _: pb.DrainRequest()),
    "prefill's Drain": Rpc(method="PrefillControl.Drain", request=lambda _: pb.DrainRequest()),
    "decode's Drain": Rpc(method="DecodeControl.Drain", request=lambda _: pb.DrainRequest()),
}

ALIASES = {
    "incarnation": ("incarnation", "instance"),
    "k_head_dim": ("head dims", "latent"),
    "v_head_dim": ("head dims", "V dim"),
    "num_layers": ("layers",),
    "runs": ("layers", "head dims"),
    "ids": ("token_ids", "prompt"),
    "token_ids": ("token_ids", "prompt"),
    "input": ("prompt",),
    "k": ("kv_scales",),
    "v": ("kv_scales",),
    "offer": ("offer", "blob"),
    "layout": ("layout", "layers"),
    "protocol_versions": ("protocol_versions", "protocol version"),
    "model_fields": ("model_fields", "model_fingerprint", "model "),
}
"""What a message calls a field, where it is not by its name."""


NEVER_RIGHT = {"nan", "inf", "-inf", "no UTF-8", f"{HUGE_LIST} entries", f"str of {HUGE_TEXT}", f"bytes of {HUGE_TEXT}"}
"""What no field has: refused, unless the field is one of `UNREAD`."""

UNREAD = {
    ("NodeControl.Abort", "request_id"),
    ("NodeControl.Abort", "reason"),
    ("PrefillControl.Abort", "request_id"),
    ("PrefillControl.Abort", "reason"),
    ("DecodeControl.Abort", "request_id"),
    ("DecodeControl.Abort", "reason"),
    ("DecodeControl.Reserve", "request_id"),
    ("PrefillControl.StreamPrompts", "traceparent"),
    ("TransferControl.Watermarks", "link.lane"),
    ("TransferControl.Watermarks", "link.obstacle"),
}
"""Texts that are only compared, or cut: an id that is not known names nothing, however long it is."""


@pytest.fixture
async def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    monkeypatch.setattr("transfer.receive.attach.secrets", SimpleNamespace(randbits=lambda bits: SESSION - 1))
    one = Nodes(tmp_path)
    await one.open()
    yield one
    await one.close()


def retell(message: Any) -> None:
    """Correct the fingerprints of a message's instance. Otherwise most of its fields would not be checked."""
    if isinstance(message, pb.JoinRequest | pb.AttachResponse):
        told = message.decode
    elif isinstance(message, pb.AttachRequest):
        told = message.prefill
    else:
        return
    try:
        told.layout_fingerprint = layout_from_proto(told.layout).fingerprint()
    except RemoteProtocolError:
        return
    told.model_fingerprint = replace(instance(1), model_fields=dict(told.model_fields)).model_fingerprint()


def names(hostile: Hostile) -> set[str]:
    """Words of which one has to be in the line: the field, what it lies in, or what lies in it."""
    return {word for part in (*hostile.path.split("."), *hostile.inner) for word in ALIASES.get(part, (part,))}


def test_every_method_is_here() -> None:
    services = pb.DESCRIPTOR.services_by_name.values()
    assert {rpc.method for rpc in RPCS.values()} == {f"{one.name}.{method.name}" for one in services for method in one.methods}


@pytest.mark.parametrize("name", RPCS)
async def test_every_field_as_no_honest_peer_has_it(nodes: Nodes, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Memory goes by what was sent, not by what it claims: the peak of both ends, which are in this process."""
    rpc = RPCS[name]
    caplog.set_level(logging.ERROR)
    request = rpc.request(nodes)
    empty = {one.name for one in request.DESCRIPTOR.fields if one.containing_oneof is None} - {
        one.name for one, _ in request.ListFields()
    }
    assert empty == rpc.empty or name == "Generate of text", f"the honest request has nothing in {empty}"
    await nodes.call(rpc, request.SerializeToString())
    wrong: list[str] = []
    count = 0
    tracemalloc.start()
    try:
        for hostile in hostile_messages(request, retell):
            count += 1
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            code, details = await nodes.call(rpc, hostile.payload)
            taken = tracemalloc.get_traced_memory()[1] - before
            if taken > TAKEN_BYTES + TAKEN_PER_BYTE * len(hostile.payload):
                wrong.append(f"{hostile}: {len(hostile.payload)} bytes took {taken}")
            is_clear = len(details.splitlines()) <= 1 and len(details) <= 2000
            if code in REFUSED and hostile.path and "cannot be read" not in details:
                is_clear = is_clear and any(word in details for word in names(hostile))
            if hostile.what in NEVER_RIGHT and (rpc.method, hostile.path) not in UNREAD:
                is_clear = is_clear and code in REFUSED | ({Code.UNAVAILABLE} if rpc.needs_session else set())
            if code not in REFUSED | {Code.OK} | rpc.codes or not is_clear:
                wrong.append(f"{hostile}: {code}: {details}")
    finally:
        tracemalloc.stop()
    assert wrong == [], "\n".join(wrong)
    assert count >= 3
    assert (await nodes.call(rpc, request.SerializeToString()))[0] in {Code.OK} | rpc.codes
    if "Drain" not in name:
        await nodes.are_serving()
    assert nodes.complaints == []
    assert [record.getMessage() for record in caplog.records if record.name.startswith("grpc")] == []

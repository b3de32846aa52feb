"""Whole histories of a `leader_world.World`: whatever prefill nodes, ranks and callers may do next, in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from decode_node.rank_messages import RunDecodeStep
from tests.decode.leader_world import OTHER_LIFE, World, has_room, turns
from transfer.connector.attempt import AttemptStage
from transfer.errors import PeerUnreachable, Preempted, TransferAborted

MOVES = (
    *(
        "submit",
        "turn",
        "reserve",
        "expected",
        "refused",
        "complete",
        "broken",
        "token",
        "sent",
        "call fails",
        "preempted",
        "abort",
    ),
    *("step", "fail step", "release", "lose peer", "rejoin", "drain", "clock"),
)


async def drained(world: World) -> None:
    """Have everybody say what is left to say, until every request is over; nothing may be left then."""
    async with asyncio.timeout(60):
        while world.transfers.request_ids:
            await world.settle()
            await asyncio.sleep(0)
    await turns()
    world.assert_nothing_is_left()


async def play(moves: Iterable[tuple[str, int]], world: World) -> None:
    """Make the moves, each with a number that picks what it is about; then the world is drained."""
    for name, pick in moves:
        await move(world, name, pick)
    for peer in (world.peer, world.other):
        if peer.instance is None:
            world.lose(peer)
    world.let_nobody_come()
    await drained(world)
    assert not [message for message in world.sent if isinstance(message, RunDecodeStep) and not message.parts]
    await world.close()


def has_ended(world: World, name: str) -> bool:
    return any(name in peer.calls and peer.calls[name].is_over for peer in (world.peer, world.other))


def is_started(world: World, name: str) -> bool:
    return name in world.reserving and world.reserving[name].done() and has_room(world.reserving[name])


async def move(world: World, kind: str, pick: int) -> None:
    rank = pick % 2
    attempts = [one for request in world.accepted for one in request.attempts if one.stage is not AttemptStage.GONE]
    live = [one.transfer_id for one in attempts]
    started = [name for name in live if is_started(world, name)]
    sent = [one.transfer_id for one in attempts if one.peer is not None]
    calls = [world.call(name) for name in live if any(name in peer.calls for peer in (world.peer, world.other))]
    match kind:
        case "submit" if world.peers.pick() is not None or (world.may_wait and world.peers.can_wait_for_node()):
            world.submit(f"r{len(world.accepted)}", 1 + pick % 20, new=1 + pick % 4)
        case "turn":
            await turns()
        case "reserve" if names := [name for name in sent if name not in world.reserving and not has_ended(world, name)]:
            world.reserve(names[pick % len(names)])
            await turns(2)
        case "expected" | "refused" if names := sorted(world.ranks[rank].unanswered):
            world.expected(rank, names[pick % len(names)], "no" if kind == "refused" else "")
        case "complete" | "broken" if names := sorted(world.ranks[rank].receiving - world.ranks[rank].unanswered):
            if kind == "complete":
                world.complete(rank, names[pick % len(names)])
            else:
                world.broken(rank, names[pick % len(names)], is_data_loss=True)
        case "token" if waiting := [call for call in map(world.call, started) if not call.has_said]:
            waiting[pick % len(waiting)].first_token()
        case "sent" if waiting := [call for call in calls if call.has_said == {"token"}]:
            waiting[pick % len(waiting)].sent()
        case "call fails" if waiting := [call for call in calls if "sent" not in call.has_said]:
            waiting[pick % len(waiting)].fail(PeerUnreachable("prefill failed"))
        case "preempted" if waiting := [call for call in calls if "sent" not in call.has_said]:
            waiting[pick % len(waiting)].fail(Preempted("prefill's engine took its pages back"))
        case "abort" if live:
            world.transfers.abort(live[pick % len(live)], TransferAborted("gone"))
        case "step" | "fail step" if world.step is not None:
            world.finish_step() if kind == "step" else world.fail_step()
        case "release" if names := world.releasable(rank):
            world.release(rank, names[pick % len(names)])
        case "lose peer" if pick % 4 == 0:
            world.lose(world.peer if pick % 8 == 0 else world.other)
        case "rejoin":
            for peer in (world.peer, world.other):
                if peer.instance is None:
                    world.num_lives += 1
                    world.join(peer, OTHER_LIFE + world.num_lives)
                elif peer.state == "draining":
                    world.join(peer, peer.instance.incarnation)
        case "drain" if pick % 4 == 0 and (world.peer if pick % 8 == 0 else world.other).state == "joined":
            world.drain(world.peer if pick % 8 == 0 else world.other)
        case "clock":
            world.now_s += pick / 100

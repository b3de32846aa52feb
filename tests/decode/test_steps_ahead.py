"""Two decode steps in flight: tokens are read one step late, and pages are released after the last step that uses them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace

import pytest

from decode_node.admission import page_needs
from decode_node.rank_messages import DecodeStepPart, FinishRequest, RunDecodeStep
from decode_node.requests import GenerationRequest
from node_runtime.rank_messages import StepDone, StepFailed
from tests.decode.leader_moves import drained
from tests.decode.leader_world import FIRST_TOKEN, OTHER_LIFE, World, first_token_of, take, told_of, turns
from tests.decode.test_worker import PROMPT, Rank
from tests.runtime.paged_memory import GROUPS, PAGE_SIZE, SHARD, WINDOW_TOKENS, HeldThread, PagedMemory
from transfer.connector.messages import CancelIncoming
from transfer.engine_types import DecodeItem, RequestFault
from transfer.errors import EngineError, OutOfMemory, PeerUnreachable, TransferAborted
from transfer.pb import kvferry_pb2 as pb
from transfer.pool.page_allocator import GroupAllocator

OTHER_FIRST = first_token_of(OTHER_LIFE)

# The leader


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = World(can_overlap=True)
    yield one
    await one.close()


async def running(world: World, name: str, *, new: int, end_ids: frozenset[int] = frozenset()) -> GenerationRequest:
    request = world.submit(name, new=new, end_ids=end_ids)
    await turns()
    await world.give_room(name)
    world.complete_all(name)
    await world.first_token(name)
    return request


def shown(world: World) -> list[list[tuple[str, int | None, int]]]:
    """(request, token, position) of each part of the steps in flight."""
    return [[(part.request_id, part.token_id, part.position) for part in step.parts] for step in world.steps]


def tokens_told(request: GenerationRequest) -> list[int]:
    return [token for item in told_of(request) if isinstance(item, pb.GeneratedTokens) for token in item.token_ids]


async def test_a_step_is_sent_before_the_tokens_of_the_running_one_are_read(world: World) -> None:
    request = await running(world, "a", new=4)
    assert shown(world) == [[("a", FIRST_TOKEN, 3)], [("a", None, 4)]]
    world.finish_step(token=8)
    assert shown(world) == [[("a", None, 4)], [("a", None, 5)]]
    world.finish_step(token=9)
    assert shown(world) == [[("a", None, 5)]], "the running step chooses the last of its tokens"
    world.finish_step(token=10)
    assert not world.steps and tokens_told(request) == [FIRST_TOKEN, 8, 9, 10]
    await drained(world)


async def test_a_request_joins_after_the_steps_in_flight(world: World) -> None:
    await running(world, "a", new=9)
    await running(world, "b", new=9)
    assert shown(world) == [[("a", FIRST_TOKEN, 3)], [("a", None, 4)]]
    world.finish_step(token=8)
    assert shown(world) == [[("a", None, 4)], [("a", None, 5), ("b", OTHER_FIRST, 3)]]
    world.finish_step(token=8)
    assert shown(world)[1] == [("a", None, 6), ("b", None, 4)]
    await drained(world)


async def test_the_token_after_an_end_token_is_dropped(world: World) -> None:
    request = await running(world, "a", new=9, end_ids=frozenset({8}))
    other = await running(world, "b", new=5)
    world.finish_step(token=8)
    assert isinstance(world.sent[-2], FinishRequest), "the ranks learn it at once"
    assert shown(world) == [[("a", None, 4)], [("b", OTHER_FIRST, 3)]]
    assert world.releasable(0) == [], "a step in flight has a row of it"
    world.finish_step(token=9)
    assert world.releasable(0) == ["a"]
    await drained(world)
    assert tokens_told(request) == [FIRST_TOKEN, 8] and len(tokens_told(other)) == 5
    assert [item.finish_reason for item in told_of(request) if isinstance(item, pb.GenerateDone)] == ["stop"]


async def test_a_client_that_leaves_between_two_steps(world: World) -> None:
    request = await running(world, "a", new=9)
    other = await running(world, "b", new=5)
    world.finish_step(token=8)
    assert world.transfers.abort("a", TransferAborted("gone"))
    world.finish_step(token=9)
    assert world.releasable(0) == [], "the second step has its row"
    assert shown(world) == [[("a", None, 5), ("b", OTHER_FIRST, 3)], [("b", None, 4)]]
    world.finish_step(token=9)
    assert world.releasable(0) == ["a"]
    await drained(world)
    assert tokens_told(request) == [FIRST_TOKEN, 8] and len(tokens_told(other)) == 5


async def test_a_failed_step_ends_its_own_requests_and_not_those_that_joined_after_it(world: World) -> None:
    request = await running(world, "a", new=9)
    other = await running(world, "b", new=5)
    world.finish_step(token=8)
    world.fail_step(is_out_of_memory=True)
    assert isinstance(take(request)[-1], OutOfMemory)
    assert shown(world) == [[("a", None, 5), ("b", OTHER_FIRST, 3)], [("b", None, 4)]]
    assert world.releasable(0) == []
    await drained(world)
    assert tokens_told(request) == [FIRST_TOKEN, 8] and len(tokens_told(other)) == 5


async def test_no_step_follows_once_the_engine_is_lost(world: World) -> None:
    request = await running(world, "a", new=9)
    world.leader.on_engine_lost()
    world.finish_step(token=8)
    assert shown(world) == [[("a", None, 4)]] and tokens_told(request) == [FIRST_TOKEN]
    await running(world, "b", new=9)
    assert shown(world) == [[("a", None, 4)]]


async def test_a_request_at_fault_is_in_one_more_step(world: World) -> None:
    request = await running(world, "a", new=9)
    world.finish_step(faults=["a"])
    assert isinstance(take(request)[-1], EngineError)
    assert shown(world) == [[("a", None, 4)]]
    world.finish_step(faults=["a"])
    assert len([item for item in told_of(request) if isinstance(item, EngineError)]) == 1
    await drained(world)


async def test_ranks_that_die_with_two_steps_in_flight(world: World) -> None:
    request = await running(world, "a", new=9)
    assert len(world.steps) == 2
    await world.leader.close(PeerUnreachable("rank 1 died"))
    assert [type(item) for item in take(request)[-2:]] == [pb.GeneratedTokens, PeerUnreachable]
    assert world.outcomes == ["failed"]


# A rank


class LateEngine:
    """Queues steps. The KV that a step reads is checked when the step is queued, and again when its tokens are read: a GPU reads
    between these times. In the meantime, all free pages are overwritten.
    """

    pool = SimpleNamespace(device="cpu")
    shard = SHARD

    def __init__(self, memory: PagedMemory, allocator: GroupAllocator) -> None:
        self._memory, self._allocator = memory, allocator
        self.failure: EngineError | None = None
        self.steps: list[list[tuple[str, bool]]] = []

    def begin_decode(self, items: Sequence[DecodeItem]) -> Callable[[], dict[str, int]]:
        failure, self.failure = self.failure, None
        if failure is not None and not isinstance(failure, RequestFault):
            raise failure
        self.steps.append([(item.request_id, item.is_unread) for item in items])
        for item in items:
            self._memory.write(item.request_id, item.page_tables, [item.position])
        self._check(items)

        def read() -> dict[str, int]:
            for group, pages in self._allocator.by_group:
                self._memory.spoil(group, pages.accounts().unbound)
            self._check(items)
            if failure is not None:
                raise failure
            return {item.request_id: 7 for item in items}

        return read

    def _check(self, items: Sequence[DecodeItem]) -> None:
        for item in items:
            # Without its state, of which a later step makes the next one.
            self._memory.read(item.request_id, item.page_tables, item.position + 1, window_tokens=WINDOW_TOKENS, has_states=False)


class RankAhead(Rank):
    """A rank whose steps are queued while the previous step runs."""

    needs = page_needs(GROUPS, PAGE_SIZE, slack_tokens=1)

    def __init__(self, num_requests: int = 1) -> None:
        self.reader = HeldThread()
        super().__init__(num_requests, reader=self.reader)

    def new_engine(self) -> LateEngine:
        self.engine = LateEngine(self.memory, self.allocator)
        return self.engine

    def ahead(self, number: int, *positions: tuple[str, int]) -> None:
        """A step of requests whose tokens the previous step chooses."""
        parts = tuple(DecodeStepPart(request_id=name, token_id=None, position=position) for name, position in positions)
        self.worker.on_message(RunDecodeStep(step=number, parts=parts))

    def outcomes(self) -> list[StepDone | StepFailed]:
        return [message for message in self.said if isinstance(message, StepDone | StepFailed)]


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_window_keeps_what_the_running_step_reads(num_requests: int) -> None:
    rank, names = RankAhead(num_requests), "abc"[:num_requests]
    for seed, name in enumerate(names):
        rank.expect(name)
        rank.arrive(name, seed)
    rank.step(0, *((name, PROMPT) for name in names))
    rank.thread.run_next()
    for number in range(1, 39):
        rank.ahead(number, *((name, PROMPT + number) for name in names))
        rank.thread.run_next()
        rank.reader.run_next()
    rank.reader.run_next()
    assert [outcome.step for outcome in rank.outcomes()] == list(range(39))
    for name in names:
        rank.worker.on_message(FinishRequest(request_id=name))
    rank.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_pages_are_released_after_the_last_step_that_uses_them(how: str) -> None:
    rank = RankAhead(1)
    rank.expect("a")
    rank.arrive("a", 1)
    rank.step(0, ("a", PROMPT))
    rank.ahead(1, ("a", PROMPT + 1))
    rank.thread.run_next()
    rank.reader.run_next()
    if how == "finished":
        rank.worker.on_message(FinishRequest(request_id="a"))
    else:
        rank.worker.on_message(CancelIncoming(transfer_id="a", reason="the client left"))
    assert not rank.released(), "the second step is not even queued"
    rank.thread.run_next()
    assert not rank.released() and rank.bound()[0], "the device may run it"
    rank.reader.run_next()
    assert rank.released() == ["a"]
    rank.assert_nothing_is_left()


def test_a_step_after_a_failed_one_runs_only_the_other_requests() -> None:
    rank = RankAhead(2)
    for seed, name in enumerate("ab"):
        rank.expect(name)
        rank.arrive(name, seed)
    rank.engine.failure = OutOfMemory("no memory")
    rank.step(0, ("a", PROMPT))
    parts = (
        DecodeStepPart(request_id="a", token_id=None, position=PROMPT + 1),
        DecodeStepPart(request_id="b", token_id=1, position=PROMPT),
    )
    rank.worker.on_message(RunDecodeStep(step=1, parts=parts))
    rank.ahead(2, ("b", PROMPT + 1))
    for thread in (rank.thread, rank.reader):
        for _ in range(3):
            thread.run_next()
    failed, *done = rank.outcomes()
    assert isinstance(failed, StepFailed) and failed.is_out_of_memory and failed.request_ids == ("a",)
    assert rank.engine.steps == [[("b", False)], [("b", True)]]
    assert [outcome.tokens for outcome in done if isinstance(outcome, StepDone)] == [{"b": 7}, {"b": 7}]


def test_a_step_whose_requests_have_all_failed_is_not_run() -> None:
    rank = RankAhead(1)
    rank.expect("a")
    rank.arrive("a", 1)
    rank.engine.failure = EngineError("no")
    rank.step(0, ("a", PROMPT))
    rank.ahead(1, ("a", PROMPT + 1))
    for thread in (rank.thread, rank.thread, rank.reader, rank.reader):
        thread.run_next()
    failed, done = rank.outcomes()
    assert isinstance(failed, StepFailed) and failed.reason == "no"
    assert isinstance(done, StepDone) and not done.tokens and not rank.engine.steps


def test_a_fault_is_reported_when_its_step_is_read() -> None:
    rank = RankAhead(1)
    rank.expect("a")
    rank.arrive("a", 1)
    rank.engine.failure = RequestFault("not finite", request_ids=["a"], tokens={})
    rank.step(0, ("a", PROMPT))
    rank.thread.run_next()
    assert not rank.outcomes()
    rank.reader.run_next()
    (done,) = rank.outcomes()
    assert isinstance(done, StepDone) and done.faults == {"a": "not finite"}

"""PrefillScheduler: first come first served, steps on the chunk grid, pages taken and given back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_node.scheduler import PrefillScheduler, StepItem
from transfer.errors import LocalProtocolError

POOL_PAGES, PAGE_SIZE, CHUNK, STEP, RUNNING = 12, 4, 8, 20, 3


def scheduler(**changes: int) -> PrefillScheduler:
    values = {"pool_pages": POOL_PAGES, "page_size": PAGE_SIZE, "chunk_tokens": CHUNK, "max_step_tokens": STEP}
    return PrefillScheduler(**{**values, "max_running": RUNNING, **changes})


def test_steps_end_on_the_chunk_grid_and_stay_within_the_budget() -> None:
    one = scheduler()
    for name, tokens in (("a", 19), ("b", 9)):
        one.submit(name, tokens)
        one.start(name)
    assert one.next_step() == (
        StepItem(request_id="a", begin=0, end=8, is_last=False),
        StepItem(request_id="b", begin=0, end=8, is_last=False),
    )
    assert one.next_step() == (
        StepItem(request_id="a", begin=8, end=16, is_last=False),
        StepItem(request_id="b", begin=8, end=9, is_last=True),
    )
    assert one.next_step() == (StepItem(request_id="a", begin=16, end=19, is_last=True),)
    assert one.next_step() == ()


def test_a_budget_below_a_chunk_still_computes_one_chunk() -> None:
    one = scheduler(max_step_tokens=1)
    for name in "ab":
        one.submit(name, 8)
        one.start(name)
    assert [item.request_id for item in one.next_step()] == ["a"]
    assert [item.request_id for item in one.next_step()] == ["b"]


def test_what_does_not_fit_the_budget_is_not_overtaken() -> None:
    one = scheduler(max_step_tokens=10)
    for name, tokens in (("a", 8), ("b", 8), ("c", 1)):
        one.submit(name, tokens)
        one.start(name)
    assert [item.request_id for item in one.next_step()] == ["a"], "c would fit beside a, but b is older"


def test_the_oldest_waits_for_its_pages_and_is_not_overtaken() -> None:
    one = scheduler()
    one.submit("running", 10 * PAGE_SIZE)
    one.start("running")
    one.submit("big", 3 * PAGE_SIZE)
    one.submit("small", 1)
    assert one.startable() == []
    one.next_step()
    assert not one.withdraw("running")
    one.release("running")
    assert one.startable() == ["big", "small"]


def test_no_more_run_than_allowed() -> None:
    one = scheduler()
    for index in range(5):
        one.submit(str(index), 1)
    assert one.startable() == ["0", "1", "2"]
    one.start("1")
    assert one.startable() == ["0", "2"]
    assert (one.num_waiting, one.num_running) == (4, 1)


def test_a_request_submitted_twice_is_refused_wherever_it_stands() -> None:
    one = scheduler()
    one.submit("a", 8)
    with pytest.raises(LocalProtocolError, match="a submitted twice"):
        one.submit("a", 8)
    one.start("a")
    with pytest.raises(LocalProtocolError, match="a submitted twice"):
        one.submit("a", 8)
    one.next_step()
    with pytest.raises(LocalProtocolError, match="a submitted twice"):
        one.submit("a", 8)


def test_withdraw_says_whether_anything_is_left() -> None:
    one = scheduler()
    one.submit("waiting", 8)
    assert one.withdraw("waiting")
    assert not one.withdraw("waiting"), "it is gone"
    one.submit("computing", 16)
    one.start("computing")
    one.next_step()
    assert not one.withdraw("computing")
    assert one.next_step() == (), "nothing more of it is computed"
    one.release("computing")
    one.check_idle()


def test_released_twice_or_pages_missing_is_noticed() -> None:
    one = scheduler()
    one.submit("a", 8)
    one.start("a")
    one.release("a")
    with pytest.raises(KeyError):
        one.release("a")
    one.check_idle()
    one._free_pages -= 1
    with pytest.raises(LocalProtocolError, match="1 pages are missing"):
        one.check_idle()


@given(num_tokens=st.integers(1, 100))
def test_can_ever_hold_agrees_with_what_starts(num_tokens: int) -> None:
    one = scheduler()
    one.submit("a", num_tokens)
    assert one.can_ever_hold(num_tokens) == (one.startable() == ["a"])


class Life(RuleBasedStateMachine):
    """Any order of calls: every token is computed once and in order, and pages are never overdrawn or lost."""

    def __init__(self) -> None:
        super().__init__()
        self.one = scheduler()
        self.sizes: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.waiting: list[str] = []
        self.started: list[str] = []
        self.withdrawn: set[str] = set()

    @rule(tokens=st.integers(1, POOL_PAGES * PAGE_SIZE))
    def submit(self, tokens: int) -> None:
        name = f"r{len(self.sizes)}"
        self.sizes[name], self.computed[name] = tokens, 0
        self.one.submit(name, tokens)
        self.waiting.append(name)

    @rule(data=st.data())
    def start_some(self, data: st.DataObject) -> None:
        """Also only some of those that may start, in any order: the decode side decides."""
        names = self.one.startable()
        assert names == self.waiting[: len(names)]
        for name in data.draw(st.permutations(names)) if names else ():
            if data.draw(st.booleans()):
                self.one.start(name)
                self.waiting.remove(name)
                self.started.append(name)

    @rule()
    def step(self) -> None:
        items = self.one.next_step()
        assert len(items) <= 1 or sum(item.end - item.begin for item in items) <= STEP
        for item in items:
            assert item.request_id not in self.withdrawn
            assert item.begin == self.computed[item.request_id] < item.end
            assert item.begin // CHUNK == (item.end - 1) // CHUNK, "within one cell"
            self.computed[item.request_id] = item.end
            assert item.is_last == (item.end == self.sizes[item.request_id])

    @precondition(lambda self: self.waiting or self.started)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.waiting + self.started))
        assert self.one.withdraw(name) == (name in self.waiting)
        self.withdrawn.add(name)
        if name in self.waiting:
            self.waiting.remove(name)

    @precondition(lambda self: self.releasable())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.releasable()))
        self.one.release(name)
        self.started.remove(name)

    def releasable(self) -> list[str]:
        return [name for name in self.started if name in self.withdrawn or self.computed[name] == self.sizes[name]]

    @invariant()
    def pages_are_counted(self) -> None:
        held = sum(self.one.pages_for(self.sizes[name]) for name in self.started)
        assert self.one._free_pages == POOL_PAGES - held >= 0
        assert self.one.num_running == len(self.started) <= RUNNING
        assert self.one.num_waiting == len(self.waiting)
        self.one.check_idle()


TestLife = Life.TestCase

"""PrefillScheduler: first come first served, steps on the chunk grid, pages taken and given back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_node.scheduler import ASKED_AT_ONCE, PrefillScheduler, StepItem, page_needs
from transfer.errors import LocalProtocolError
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout

POOL_PAGES, PAGE_SIZE, CHUNK, STEP, RUNNING = 12, 4, 8, 20, 3


def scheduler(kind: type[PrefillScheduler] = PrefillScheduler, **changes: int) -> PrefillScheduler:
    values = {"pool_pages": POOL_PAGES, "chunk_tokens": CHUNK, "max_step_tokens": STEP, "max_running": RUNNING, **changes}
    groups = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))
    needs = page_needs(groups, PAGE_SIZE, chunk_tokens=values["chunk_tokens"])
    return kind(pool_pages=PageCounts((values.pop("pool_pages"),)), needs=needs, **values)


def submit(one: PrefillScheduler, name: str, tokens: int, destination: int = 1) -> None:
    one.submit(name, tokens, destination=destination)


def start(one: PrefillScheduler, name: str) -> None:
    one.accept(name)
    assert one.start_accepted() == [name]


def asking(one: PrefillScheduler) -> list[str]:
    """Every request that may ask now. The decode side has no room for any of them."""
    names = one.next_to_ask()
    for name in names:
        one.not_yet(name)
    return names


def test_what_is_computed_of_a_request_is_known_while_it_is_started() -> None:
    one = scheduler()
    submit(one, "a", 19)
    assert one.num_computed("a") == 0
    start(one, "a")
    found = []
    while one.next_step():
        found.append(one.num_computed("a"))
    assert found == [8, 16, 19]
    one.release("a")
    assert one.num_computed("a") == 0


def test_no_younger_prompt_overtakes_one_beyond_the_step_budget() -> None:
    one = scheduler(max_step_tokens=10)
    for name, tokens in (("a", 8), ("b", 8), ("c", 1)):
        submit(one, name, tokens)
        start(one, name)
    assert [item.request_id for item in one.next_step()] == ["a"], "c would fit beside a, but b is older"


def test_a_prompt_that_the_pool_cannot_hold_takes_host_pages() -> None:
    one = scheduler(host_pages=30)
    assert [one.can_ever_hold(pages * PAGE_SIZE) for pages in (POOL_PAGES, POOL_PAGES + 1, 30, 31)] == [True, True, True, False]
    assert (one.pages_for(13 * PAGE_SIZE), one.all_pages) == ("0 device and 13 host", "12 device and 30 host")
    for name, pages in (("long", 25), ("longer", 20), ("short", 12)):
        submit(one, name, pages * PAGE_SIZE)
    assert asking(one) == ["long", "short"], "only 5 host pages are left"
    start(one, "long")
    assert one.is_in_host("long") and one.free_pages.by_group == (POOL_PAGES,)
    assert asking(one) == ["short"], "a request that waits for host pages delays no request on the device"
    while one.next_step():
        pass
    one.release("long")
    assert asking(one) == ["longer", "short"]
    start(one, "longer")
    start(one, "short")
    assert not one.is_in_host("short") and one.free_pages.by_group == (0,)
    while one.next_step():
        pass
    one.release("longer")
    one.release("short")
    one.check_idle()


def test_a_prompt_in_host_memory_does_not_hold_up_the_others() -> None:
    one = scheduler(host_pages=100, max_step_tokens=CHUNK)
    submit(one, "long", 100 * PAGE_SIZE)
    start(one, "long")
    assert [item.request_id for item in one.next_step()] == ["long"]
    for name in ("a", "b"):
        submit(one, name, 2 * CHUNK)
        start(one, name)
    steps = [[item.request_id for item in one.next_step()] for _ in range(8)]
    assert steps == [["a"], ["long"], ["a"], ["long"], ["b"], ["long"], ["b"], ["long"]]


def test_only_requests_that_wait_for_pages_are_counted_as_such() -> None:
    one = scheduler(max_running=2)
    assert one.num_short_of_pages == 0
    submit(one, "running", 10 * PAGE_SIZE)
    assert one.num_short_of_pages == 0, "it waits for the decode side"
    start(one, "running")
    submit(one, "big", 3 * PAGE_SIZE)
    submit(one, "small", 1)
    assert one.num_short_of_pages == 2
    one.accept("big")
    assert one.start_accepted() == [] and one.num_short_of_pages == 2
    one.withdraw("big")
    assert one.num_short_of_pages == 0
    start(one, "small")
    submit(one, "more", 3 * PAGE_SIZE)
    assert one.num_short_of_pages == 0, "it waits for one of those that run"


def test_the_oldest_waits_for_its_pages_and_is_not_overtaken() -> None:
    one = scheduler()
    submit(one, "running", 10 * PAGE_SIZE)
    start(one, "running")
    submit(one, "big", 3 * PAGE_SIZE)
    submit(one, "small", 1)
    assert asking(one) == []
    one.next_step()
    assert not one.withdraw("running")
    one.release("running")
    assert asking(one) == ["big", "small"]


class Leaking(PrefillScheduler):
    """Loses a page with each request."""

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._free_pages -= PageCounts((1, 0))


def test_mistakes_are_named() -> None:
    one = scheduler(kind=Leaking)
    submit(one, "a", 8)
    with pytest.raises(LocalProtocolError, match="a submitted twice"):
        submit(one, "a", 8)
    start(one, "a")
    one.hold("a")
    for number in (-1, 8):
        with pytest.raises(LocalProtocolError, match=f"{number} tokens of a were loaded, of 8; one is computed"):
            one.begin_at("a", number)
    one.release("a")
    with pytest.raises(LocalProtocolError, match="1 pages are missing"):
        one.check_idle()


@given(num_tokens=st.integers(1, 100))
def test_can_ever_hold_agrees_with_what_starts(num_tokens: int) -> None:
    one = scheduler()
    submit(one, "a", num_tokens)
    assert one.can_ever_hold(num_tokens) == (asking(one) == ["a"])


BIG, SMALL = 8 * PAGE_SIZE, 1


def test_more_than_fits_may_be_accepted_and_starts_when_pages_are_back() -> None:
    one = scheduler()
    submit(one, "a", BIG, destination=1)
    submit(one, "b", BIG, destination=2)
    submit(one, "c", SMALL, destination=3)
    for name in asking(one):
        one.accept(name)
    assert one.start_accepted() == ["a"], "c would fit, but b was accepted before it"
    assert (one.num_waiting, one.num_running) == (2, 1)
    assert asking(one) == [] == one.start_accepted()
    assert one.withdraw("b"), "it was never started"
    assert one.start_accepted() == ["c"]
    one.withdraw("a")
    one.release("a")
    one.withdraw("c")
    one.release("c")
    one.check_idle()


def test_one_that_others_overtook_is_asked_for_and_is_next() -> None:
    one = scheduler()
    submit(one, "running", 6 * PAGE_SIZE)
    start(one, "running")
    submit(one, "big", BIG, destination=1)
    submit(one, "same", SMALL, destination=1)
    submit(one, "other", SMALL, destination=2)
    assert asking(one) == ["other"], "nobody has overtaken it yet"
    start(one, "other")
    submit(one, "another", SMALL, destination=2)
    assert asking(one) == ["big", "another"], "the decode side may have no room for the big one"
    one.accept("big")
    assert one.start_accepted() == [] == asking(one)
    one.withdraw("running")
    one.release("running")
    assert one.start_accepted() == ["big"]


def test_one_that_others_overtook_is_asked_for_although_all_slots_are_taken() -> None:
    one = scheduler(max_running=3)
    submit(one, "running", 6 * PAGE_SIZE)
    start(one, "running")
    submit(one, "big", BIG, destination=1)
    submit(one, "first", SMALL, destination=2)
    submit(one, "second", SMALL, destination=2)
    assert one.next_to_ask() == ["first", "second"]
    one.accept("second")
    one.accept("first")
    assert one.next_to_ask() == [], "it would get no slot, because others have room already"
    assert one.start_accepted() == ["second", "first"]
    assert one.next_to_ask() == ["big"] and one.next_to_ask() == [], "it asks until it is answered"
    one.withdraw("big")
    one.not_yet("big")
    submit(one, "later", SMALL, destination=1)
    assert one.next_to_ask() == [], "nobody has overtaken this one, and there is no slot"


def test_a_later_request_waits_while_an_older_one_may_need_its_pages() -> None:
    one = scheduler()
    submit(one, "asks", 6 * PAGE_SIZE, destination=1)
    submit(one, "other", 8 * PAGE_SIZE, destination=2)
    assert one.next_to_ask() == ["asks", "other"]
    one.accept("other")
    submit(one, "behind", SMALL, destination=1)
    assert one.next_to_ask() == []
    one.withdraw("other")
    assert one.next_to_ask() == ["behind"]


def test_only_the_oldest_few_of_each_destination_are_named() -> None:
    one = scheduler(pool_pages=100, max_running=100)
    for index in range(2 * ASKED_AT_ONCE):
        submit(one, f"full-{index}", SMALL, destination=1)
    submit(one, "idle", SMALL, destination=2)
    oldest = [f"full-{index}" for index in range(ASKED_AT_ONCE)]
    assert asking(one) == [*oldest, "idle"]
    start(one, "full-0")
    assert asking(one) == [*oldest[1:], f"full-{ASKED_AT_ONCE}", "idle"], "the next one moves up"


def test_what_was_loaded_is_not_computed_and_nobody_waits_for_it() -> None:
    one = scheduler()
    for name, tokens in (("a", 19), ("b", 3)):
        submit(one, name, tokens)
        start(one, name)
    one.hold("a")
    assert [item.request_id for item in one.next_step()] == ["b"]
    assert one.next_step() == ()
    one.begin_at("a", 12)
    assert one.next_step() == (StepItem(request_id="a", begin=12, end=16, is_last=False),)
    assert one.next_step() == (StepItem(request_id="a", begin=16, end=19, is_last=True),)


def test_a_request_that_is_held_can_be_withdrawn() -> None:
    one = scheduler()
    submit(one, "a", 8)
    start(one, "a")
    one.hold("a")
    assert not one.withdraw("a")
    with pytest.raises(LocalProtocolError, match="request a has ended; its loaded pages arrived too late"):
        one.begin_at("a", 4)
    one.release("a")
    assert not one.withdraw("a"), "it is gone"
    one.check_idle()


class Life(RuleBasedStateMachine):
    """Any order of calls: every token is computed once and in order, and pages are never overdrawn or lost."""

    def __init__(self) -> None:
        super().__init__()
        self.one = scheduler()
        self.sizes: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.waiting: list[str] = []
        self.destinations: dict[str, int] = {}
        self.asking: set[str] = set()
        self.accepted: list[str] = []
        self.started: list[str] = []
        self.last_started: dict[int, int] = {}  # by destination: number of the youngest
        self.withdrawn: set[str] = set()
        self.held: set[str] = set()

    @rule(tokens=st.integers(1, POOL_PAGES * PAGE_SIZE), destination=st.integers(1, 3))
    def submit(self, tokens: int, destination: int) -> None:
        name = f"r{len(self.sizes)}"
        self.sizes[name], self.computed[name], self.destinations[name] = tokens, 0, destination
        self.one.submit(name, tokens, destination=destination)
        self.waiting.append(name)

    @rule(data=st.data())
    def accept_some(self, data: st.DataObject) -> None:
        """Also only some of those that may start, in any order: the decode side decides, and may answer later."""
        names, may_ask = self.one.next_to_ask(), self.may_ask()
        assert names == [name for name in may_ask if name not in self.asking]
        self.asking.update(names)
        for name in data.draw(st.permutations(sorted(self.asking))) if self.asking else ():
            answer = data.draw(st.sampled_from(("accept", "not yet", "later")))
            if answer == "later":
                continue
            self.asking.remove(name)
            if answer == "not yet":
                self.one.not_yet(name)
            else:
                self.one.accept(name)
                self.waiting.remove(name)
                self.accepted.append(name)

    def may_ask(self) -> list[str]:
        """Every request that may ask now, by the rules and without any memory of earlier questions."""
        found = []
        for destination in range(1, 4):
            pages = self.one.free_pages.by_group[0] - sum(self.pages(name) for name in self.accepted)
            slots = min(RUNNING - len(self.started) - len(self.accepted), ASKED_AT_ONCE)
            queue = [name for name in self.waiting if self.destinations[name] == destination]
            for position, name in enumerate(queue):
                pages, slots = pages - self.pages(name), slots - 1
                if pages >= 0 and slots >= 0:
                    found.append(name)
                    continue
                others = (last for other, last in self.last_started.items() if other != destination)
                if position == 0 and not self.accepted and max(others, default=-1) > int(name[1:]):
                    found.append(name)
                break
        return sorted(found, key=lambda name: int(name[1:]))

    def pages(self, name: str) -> int:
        return -(-self.sizes[name] // PAGE_SIZE)

    @rule()
    def start_accepted(self) -> None:
        names = self.one.start_accepted()
        assert names == self.accepted[: len(names)]
        del self.accepted[: len(names)]
        self.started += names
        for name in names:
            last = self.last_started.get(self.destinations[name], -1)
            self.last_started[self.destinations[name]] = max(last, int(name[1:]))
        for name in names:
            if int(name[1:]) % 2:
                self.one.hold(name)
                self.held.add(name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.computed[name] = data.draw(st.integers(0, self.sizes[name] - 1))
        self.one.begin_at(name, self.computed[name])
        self.held.discard(name)

    @rule()
    def step(self) -> None:
        items = self.one.next_step()
        assert len(items) <= 1 or sum(item.end - item.begin for item in items) <= STEP
        for item in items:
            assert item.request_id not in self.withdrawn | self.held
            assert item.begin == self.computed[item.request_id] < item.end
            assert item.begin // CHUNK == (item.end - 1) // CHUNK, "within one cell"
            self.computed[item.request_id] = item.end
            assert item.is_last == (item.end == self.sizes[item.request_id])

    @precondition(lambda self: self.waiting or self.accepted or self.started)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.waiting + self.accepted + self.started))
        assert self.one.withdraw(name) == (name not in self.started)
        self.withdrawn.add(name)
        self.held.discard(name)
        self.asking.discard(name)
        for names in (self.waiting, self.accepted):
            if name in names:
                names.remove(name)

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
        held = sum(self.pages(name) for name in self.started)
        assert self.one.free_pages.by_group == (POOL_PAGES - held,) and held <= POOL_PAGES
        assert self.one.num_running == len(self.started) <= RUNNING
        assert self.one.num_waiting == len(self.waiting) + len(self.accepted)
        self.one.check_idle()


TestLife = Life.TestCase


def test_the_pages_that_a_request_needs_are_shown_in_messages() -> None:
    assert scheduler().pages_for(PAGE_SIZE + 1) == "2"

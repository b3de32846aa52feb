"""When a TLS context may be replaced: never while a handshake may be about to take a reference to it."""

from __future__ import annotations

from transfer.registry.security import MAX_AGE_S, SETTLE_S, Renewal


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_a_handshake_after_a_pause_has_a_context_of_its_own_at_once() -> None:
    clock = Clock()
    renewal = Renewal(clock, clock.sleep)
    for _ in range(3):
        assert renewal.is_due("files")
        clock.now_s += SETTLE_S
    assert not clock.slept_s


def test_handshakes_at_once_share_a_context_until_it_is_old_and_settled() -> None:
    clock = Clock()
    renewal = Renewal(clock, clock.sleep)
    assert renewal.is_due("files")
    began_s, num_shared = clock.now_s, 0
    while not clock.slept_s:
        asked_s = clock.now_s = clock.now_s + SETTLE_S / 2
        if renewal.is_due("files"):
            break
        num_shared += 1
    assert num_shared > 10 and MAX_AGE_S <= asked_s - began_s < MAX_AGE_S + SETTLE_S
    assert clock.slept_s == [SETTLE_S / 2], "until the last one that asked has had its time"
    assert not renewal.is_due("files"), "the next one shares the new one"


def test_new_files_are_used_at_once_but_for_that_wait() -> None:
    clock = Clock()
    renewal = Renewal(clock, clock.sleep)
    assert renewal.is_due("files")
    assert not renewal.is_due("files")
    assert renewal.is_due("new files")
    assert clock.slept_s == [SETTLE_S]
    assert not renewal.is_due("new files")

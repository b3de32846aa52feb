"""Signals of a writer's stream: order, digests, reuse of entries, and writers that break the rules."""

from __future__ import annotations

import ctypes

from tests.transport.host_cuda import HostWords
from transfer.transport.shared_memory import shared_memory
from transfer.transport.signals import NUM_BYTES, NUM_ENTRIES, SignalReader, SignalWriter


class Ends:
    """Both ends on the same memory. The writer's stream runs its work at once."""

    def __init__(self) -> None:
        memory = shared_memory(NUM_BYTES)
        self.writer, self.reader = SignalWriter(HostWords(memory)), SignalReader(HostWords(memory))
        self._total = ctypes.c_uint64(2**64 - 3)  # the next sum wraps around

    def gather(self, grant: int, digest: int) -> bool:
        signal, address = self.writer.of(grant), ctypes.addressof(self._total)
        signal.begin(0, address)
        self._total.value += digest
        signal.end(0, address)
        return signal.is_sent


def test_gathers_are_reported_in_order_each_with_its_own_digest() -> None:
    ends = Ends()
    assert ends.reader.take() == []
    for grant, digest in ((4096, 7), (64, 0), (2**63, 2**64 - 1)):
        assert ends.gather(grant, digest)
    taken = ends.reader.take()
    assert [(signal.grant, signal.digest) for signal in taken] == [(4096, 7), (64, 0), (2**63, 2**64 - 1)]
    assert ends.reader.take() == []


def test_awaited_words_reach_their_values_at_begin_and_end() -> None:
    ends = Ends()
    for number in range(1, 2 * NUM_ENTRIES):
        assert ends.reader.awaited is not None and not ends.reader.is_near
        address, value = ends.reader.awaited
        word = ctypes.c_uint64.from_address(address)
        assert word.value < value == number
        signal = ends.writer.of(number)
        signal.begin(0, ctypes.addressof(word))
        assert word.value == value and ends.reader.is_near
        begun, begun_value = ends.reader.awaited
        assert begun != address and ctypes.c_uint64.from_address(begun).value == begun_value
        (arrival,) = ends.reader.take()
        end, end_value = arrival.awaited_end
        assert ctypes.c_uint64.from_address(end).value < end_value
        signal.end(0, ctypes.addressof(word))
        assert ctypes.c_uint64.from_address(end).value == end_value
        arrival.close()


def test_a_given_up_signal_ends_the_wait_and_its_writer_sends_a_message() -> None:
    """Otherwise the message of a gather that takes longer than the wait would follow only after `repeat_after_s`."""
    ends = Ends()
    signal = ends.writer.of(8)
    signal.begin(0, ctypes.addressof(ctypes.c_uint64()))
    assert signal.is_sent
    (arrival,) = ends.reader.take()
    address, value = arrival.awaited_end
    for word, written in arrival.giving_up:
        ctypes.c_uint64.from_address(word).value = written
    assert ctypes.c_uint64.from_address(address).value == value
    assert not signal.is_sent


def test_without_a_free_entry_no_signal_is_sent_and_later_ones_are() -> None:
    """Entries are closed in any order. An entry is reused only when all earlier entries are closed."""
    ends = Ends()
    for grant in range(NUM_ENTRIES):
        assert ends.gather(grant, grant)
    assert not ends.gather(1000, 5)
    first, second, *others = ends.reader.take()
    assert ends.reader.awaited is None
    for signal in [second, *others]:
        signal.close()
    assert not ends.gather(1001, 5)
    first.close()
    assert ends.gather(1002, 9)
    (arrival,) = ends.reader.take()
    assert (arrival.grant, arrival.digest) == (1002, 9)


def test_a_stopped_writer_sends_no_more() -> None:
    ends = Ends()
    assert ends.gather(1, 1)
    ends.reader.stop()
    assert not ends.gather(2, 2)
    assert ends.reader.take() == [] and ends.reader.awaited is None  # signals that were sent before are ignored, too


def test_signals_continue_in_order_after_a_pause() -> None:
    """Signals that were sent before the stop are included."""
    ends = Ends()
    signal = ends.writer.of(1)
    signal.begin(0, ctypes.addressof(ctypes.c_uint64()))
    ends.reader.stop()
    assert not ends.gather(2, 2)
    ends.reader.resume()
    assert ends.gather(3, 9)
    assert [signal.grant for signal in ends.reader.take()] == [1, 3]


def test_a_writer_that_breaks_the_rules_is_not_followed() -> None:
    """The reader returns at most one signal per entry, and never looks without end."""
    memory = shared_memory(NUM_BYTES)
    words, reader = HostWords(memory), SignalReader(HostWords(memory))
    for word in range(8, NUM_BYTES // 8):
        words.words[word] = 2**64 - 1
    assert reader.take() == []  # no number is the next one
    assert reader.is_stopped and reader.awaited is None  # a wait for that word would not wait
    for word in range(NUM_BYTES // 8):
        words.words[word] = 0
    reader = SignalReader(HostWords(memory))
    for number in range(1, NUM_ENTRIES + 1):
        words.words[8 * number + 2] = number
    assert len(reader.take()) == NUM_ENTRIES
    for number in range(1, NUM_ENTRIES + 1):
        words.words[8 * number + 2] = NUM_ENTRIES + number
    assert reader.take() == [] and reader.awaited is None

"""A store that does not answer holds nobody up, and only what the store itself says is taken for its loss."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from syncstate.wire import store as module
from syncstate.wire.notes import Note, NoteBoard, fit
from syncstate.wire.store import Store, StoreLost


class Slow:
    """A client whose host is stopped: no call returns before `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.go_on.wait()
        return keys == ["there"]

    def set(self, key: str, value: str) -> None:
        self.asked += 1


@pytest.fixture
def slow() -> Iterator[Slow]:
    raw = Slow()
    yield raw
    raw.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "syncstate-store":
            thread.join(5.0)


def test_the_calls_are_those_of_torch() -> None:
    raw = dist.HashStore()
    store = Store.open(lambda: dist.PrefixStore("place", raw), 5.0)
    part = store.under(lambda mine: dist.PrefixStore("part", mine))
    part.set("a", "ä")
    assert part.get("a") == "ä".encode()
    assert part.compare_set("a", "ä", "b") == b"b"
    assert [part.add("n", 2), part.add("n", 3)] == [2, 5]
    assert part.check(["a", "n"])
    assert not part.check(["a", "m"])
    assert [part.glance("a"), part.glance("m")] == [True, False]
    assert sorted(part.list_keys()) == ["a", "n"]
    part.delete_key("a")
    assert part.list_keys() == ["n"]
    assert bytes(raw.get("place/part/n")) == b"5"
    assert part.clone().check(["n"])
    part.leave()
    assert part.check(["n"])  # a call after that starts the thread again
    part.leave()


def test_a_call_without_an_answer_ends_and_no_other_is_made(slow: Slow) -> None:
    store = Store.open(lambda: slow, 0.2)
    with pytest.raises(StoreLost, match=r"^no answer for 0\.2 s$"):
        store.check(["there"])
    assert store.lost == "no answer for 0.2 s"
    with pytest.raises(StoreLost, match=r"^no answer for 0\.2 s$"):
        store.set("a", "b")
    assert slow.asked == 1
    store.leave()


def test_a_glance_at_a_silent_store_says_no_and_its_answer_comes_later(slow: Slow) -> None:
    store = Store.open(lambda: slow, 0.1)
    assert [store.glance("there") for _ in range(3)] == [False] * 3
    assert (store.lost, slow.asked) == (None, 1)
    slow.go_on.set()
    assert store.glance("there")
    assert store.check(["there"])
    store.leave()


def test_a_call_after_a_long_silence_is_not_waited_for_as_long_again(slow: Slow) -> None:
    store = Store.open(lambda: slow, 0.4)
    for _ in range(3):
        store.glance("there")  # 0.2 s each
    with pytest.raises(StoreLost, match=r"^no answer for (0\.[6-9]|[1-9]\.\d) s$"):  # of which it waited 0.1 s itself
        store.check(["there"])
    store.leave()


def test_a_client_that_cannot_connect_is_given_up(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.2)
    with pytest.raises(StoreLost):
        Store.open(lambda: slow.go_on.wait(), 60.0)


def test_only_an_error_of_the_store_is_a_loss() -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise {"gone": dist.DistNetworkError("Broken pipe"), "odd": KeyError("odd")}[keys[0]]

    store = Store.open(Broken, 5.0)
    with pytest.raises(StoreLost, match=r"^Broken pipe$"):
        store.check(["gone"])
    with pytest.raises(KeyError):
        store.check(["odd"])
    store.leave()


def test_a_forked_child_is_refused_at_once() -> None:
    store = Store.open(dist.HashStore, 5.0)
    child = os.fork()
    if child == 0:
        try:
            store.check(["a"])
        except StoreLost as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not store.check(["a"])
    store.leave()


def test_the_thread_ends_with_its_client() -> None:
    def threads() -> int:
        return sum(thread.name == "syncstate-store" for thread in threading.enumerate())

    store = Store.open(dist.HashStore, 5.0)
    assert threads() == 1
    del store  # forgotten, as a start that failed leaves it
    end = time.monotonic() + 5.0
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == 0


@pytest.mark.parametrize("room", [64, 65, 66, 67, 68])
def test_a_long_text_keeps_both_ends_and_whole_characters(room: int) -> None:
    text = fit("begin " + "\u20ac" * 100 + " end", room)
    assert text.startswith("begin \u20ac")
    assert text.endswith("\u20ac end")
    assert text.count("\n[...]\n") == 1
    assert room - 6 <= len(text.encode()) <= room
    assert fit("begin " + "\u20ac" * 10, room) == "begin " + "\u20ac" * 10


def test_a_text_that_is_no_unicode_is_escaped() -> None:
    assert fit("a\udc80b") == "a\\udc80b"


def test_the_first_note_stands_cut_to_what_a_store_takes() -> None:
    store: Any = Store.open(dist.HashStore, 5.0)
    first, second = (NoteBoard(store, rank, 2) for rank in (0, 1))
    assert not first.alarmed()
    posted = first.post(Note("codec", 0, 3, "x" * 9_000_000))
    assert len(posted.text) == 65536 - 1
    assert second.alarmed()
    assert second.post(Note("peer", 1, 4, "later")) == posted
    assert second.hear(4) == posted
    store.leave()

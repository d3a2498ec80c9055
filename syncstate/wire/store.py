"""The key-value store of the process group, asked in such a way that no rank waits for ever.

The store's own calls have no deadline: where the process that hosts it is stopped, or its machine is cut off, most of
them never return, and while they do not, Python runs no signal handler. So they are made in a thread of their own.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

__all__ = ["Store", "StoreLost", "gone"]

_PATIENCE_SECONDS = 10.0
_HURRY_SECONDS = 3.0
_GLANCE_SECONDS = 0.2
_LAST_SECONDS = 0.1  # what a call gets at least, where another has waited for long
_LEAVING_SECONDS = 0.5


class StoreLost(RuntimeError):
    """The store does not answer, or its host has gone. Never raised for anything else."""


def gone(error: object) -> str:
    """What can be said of a store that no longer answers; `error` is what it said last."""
    told = str(error).split("\n", 1)[0][:200]
    why = "the process that hosts it, usually rank 0, has died, is stopped, or has destroyed its default process group"
    if not dist.is_initialized():
        why += "; this rank has destroyed its own: close the engine before that"
    return f"the key-value store of the process group no longer answers: {why} ({told})"


class Store:
    """A client of the store, for one thread at a time. Its calls are those of `torch.distributed.Store`.

    Args:
        raw: The client that is asked; nobody else uses it.
        clerk: Who asks it.
    """

    def __init__(self, raw: Any, clerk: "_Clerk") -> None:
        self._raw = raw
        self._clerk = clerk
        self._glance: _Request | None = None

    @classmethod
    def open(cls, connect: Callable[[], Any], timeout: float) -> "Store":
        """Connect a client.

        Args:
            connect: Makes the client; may block for as long as it likes.
            timeout: Seconds that the user grants; no later call takes much longer, or than 10 s.

        Raises:
            StoreLost: The store does not answer.
        """
        clerk = _Clerk(_PATIENCE_SECONDS)  # looking up the host's name may take its time
        try:
            raw = clerk.call(connect)
            clerk.patience = min(timeout, _PATIENCE_SECONDS)
            return cls(raw, clerk)
        except BaseException:
            clerk.leave()
            raise

    def under(self, make: Callable[[Any], Any]) -> "Store":
        """The same client with another prefix, which `make` puts before it."""
        return Store(make(self._raw), self._clerk)

    @property
    def lost(self) -> str | None:
        """Why no further call is made; None while they are."""
        return self._clerk.lost

    def hurry(self) -> None:
        """A rank has failed, perhaps the one that hosts the store: wait for no answer much longer than 3 s."""
        self._clerk.patience = min(self._clerk.patience, _HURRY_SECONDS)

    def check(self, keys: list[str]) -> bool:
        found: bool = self._clerk.call(self._raw.check, keys)
        return found

    def glance(self, key: str) -> bool:
        """Whether there is such a key, where the answer comes soon; False where it does not, and the next call sees it.

        For what is asked again and again while there are other things to do. A store that is silent for a while is not
        given up for it.
        """
        asked = self._glance or self._clerk.ask(self._raw.check, [key])
        self._glance = None if asked.wait(_GLANCE_SECONDS) else asked
        return self._glance is None and bool(asked.answer())

    def get(self, key: str) -> bytes:
        """The content of a key that is there."""
        content: bytes = self._clerk.call(self._raw.get, key)
        return content

    def set(self, key: str, value: str) -> None:
        self._clerk.call(self._raw.set, key, value)

    def add(self, key: str, amount: int) -> int:
        count: int = self._clerk.call(self._raw.add, key, amount)
        return count

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        content: bytes = self._clerk.call(self._raw.compare_set, key, expected, desired)
        return content

    def delete_key(self, key: str) -> None:
        self._clerk.call(self._raw.delete_key, key)

    def list_keys(self) -> list[str]:
        keys: list[str] = self._clerk.call(self._raw.list_keys)
        return keys

    def clone(self) -> Any:
        """A client of its own, with the same prefix, for one whose waits may lock it."""
        return self._clerk.call(self._raw.clone)

    def leave(self) -> None:
        """Let the thread go, with whatever it waits for. A later call would start another."""
        self._clerk.leave()


class _Request:
    """One call: what to do, and what became of it."""

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.asked = time.monotonic()
        self._call = call
        self._arguments = arguments
        self._result: Any = None
        self._error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        try:
            self._result = self._call(*self._arguments)
        except Exception as error:
            self._error = error
        self._done.release()

    def wait(self, seconds: float) -> bool:
        """Whether there is an answer, soon. Signals get through meanwhile; what their handlers raise, leaves here."""
        if not self._done.acquire(timeout=seconds):
            return False
        self._done.release()
        return True

    def answer(self) -> Any:
        if isinstance(self._error, RuntimeError):
            raise StoreLost(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return self._result


class _Clerk:
    """Makes the calls of a client one after the other, in a thread of its own."""

    def __init__(self, patience: float) -> None:
        self.lost: str | None = None
        self.patience = patience
        self._process = os.getpid()
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._oldest: _Request | None = None  # of those without an answer
        self._thread: threading.Thread | None = None
        # The thread knows the queue alone, so it keeps nothing alive; at the exit of the process others may still ask.
        weakref.finalize(self, self._requests.put, None).atexit = False

    def ask(self, call: Callable[..., Any], *arguments: Any) -> _Request:
        """Hand a call in, without waiting for its answer."""
        if self.lost is not None:
            raise StoreLost(self.lost)
        if os.getpid() != self._process:
            raise StoreLost("this process was forked from the one that uses the store")
        if self._thread is None:
            # Kept before it is started, because an interrupt while it starts leaves it running.
            self._thread = threading.Thread(target=_serve, args=(self._requests,), name="syncstate-store", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter is ending, or the system has no more threads
                self._thread = None
                raise StoreLost(str(error)) from error
        request = _Request(call, arguments)
        if self._oldest is None or self._oldest.wait(0.0):
            self._oldest = request
        self._requests.put(request)
        return request

    def call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Hand a call in and wait for its answer.

        Raises:
            StoreLost: There is none in time, and so there will be no further calls; or the store said that it is gone.
        """
        request = self.ask(call, *arguments)
        oldest = self._oldest or request
        if not request.wait(max(oldest.asked + self.patience - time.monotonic(), _LAST_SECONDS)):
            self.lost = f"no answer for {time.monotonic() - oldest.asked:.1f} s"
            raise StoreLost(self.lost)
        return request.answer()

    def leave(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            if self.lost is None and os.getpid() == self._process:
                thread.join(_LEAVING_SECONDS)


def _serve(requests: "SimpleQueue[_Request | None]") -> None:
    while (request := requests.get()) is not None:
        request.run()
        del request  # or it would keep its client until the next one

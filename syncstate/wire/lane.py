"""One gloo group of a channel, and the operations that are on their way in it."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from syncstate.wire.sockets import Sockets
from syncstate.wire.verdict import Wait

__all__ = ["SLICE", "Lane", "Operation", "limit_of"]

SLICE = timedelta(milliseconds=100)
_SPARE_SECONDS = 30.0
_LONGEST_SECONDS = 3e8  # the backend counts nanoseconds in 64 bits

_LINGER_SECONDS = 2e-4
_yield: Callable[[], object] | None = getattr(os, "sched_yield", None)  # not on every system

_limits: dict[float, timedelta] = {}  # one for each timeout of a plan


def limit_of(timeout: float) -> timedelta:
    """The backend's own limit: it outlives ours, because an operation that times out by itself closes connections."""
    limit = _limits.get(timeout)
    if limit is None:
        limit = _limits[timeout] = timedelta(seconds=min(timeout, _LONGEST_SECONDS) + _SPARE_SECONDS)
    return limit


class Operation:
    """A collective, or a message to one rank, that was posted and is on its way.

    Attributes:
        wait: What to say when it fails.
        lane: Where it runs; None where there is nobody to talk to, and the operation is over.
        work: The backend's handle; None when the operation is over. Nothing else may keep it: a frame of a traceback
            that does would keep the whole group.
    """

    __slots__ = ("lane", "wait", "work")

    def __init__(self, wait: Wait, lane: "Lane | None" = None, work: Any = None) -> None:
        self.wait = wait
        self.lane = lane
        self.work = work

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.work is None or self.work.is_completed()

    def linger(self) -> None:
        """Look again and again, for a while, before going to sleep: to be woken takes longer than a small message.

        Between looks the processor is given to whoever wants it, so that a busy machine loses nothing.
        """
        if _yield is None or self.done():
            return
        end = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < end:
            _yield()
            if self.done():
                return


class Lane:
    """A gloo group with its connections. Operations of one lane are posted in the same order on all ranks.

    Args:
        group: The process group.
        sockets: Its connections.
    """

    def __init__(self, group: Any, sockets: Sockets) -> None:
        self._group = group
        self._flying: set[Operation] = set()
        self.sockets = sockets

    def _post(self, wait: Wait, work: Any) -> Operation:
        operation = Operation(wait, self, work)
        self._flying.add(operation)
        return operation

    def broadcast(self, wait: Wait, buffer: torch.Tensor, root: int) -> Operation:
        """Post a broadcast of `buffer` from the rank `root`. Raises RuntimeError where the group is broken."""
        return self._post(wait, self._group.broadcast(buffer, root, limit_of(wait.timeout)))

    def gather(self, wait: Wait, buffer: torch.Tensor, outputs: list[torch.Tensor] | None, root: int) -> Operation:
        """Post a gather of equally large buffers to `root`, which alone has `outputs`, one for each rank."""
        options = dist.GatherOptions()
        options.rootRank, options.timeout = root, limit_of(wait.timeout)
        return self._post(wait, self._group.gather([] if outputs is None else [outputs], [buffer], options))

    def scatter(self, wait: Wait, buffer: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> Operation:
        """Post a scatter of equally large buffers from `root`, which alone has `inputs`, one for each rank."""
        options = dist.ScatterOptions()
        options.rootRank, options.timeout = root, limit_of(wait.timeout)
        return self._post(wait, self._group.scatter([buffer], [] if inputs is None else [inputs], options))

    def all_reduce(self, wait: Wait, tensor: torch.Tensor) -> Operation:
        """Post a sum over all ranks, in place."""
        options = dist.AllreduceOptions()
        options.timeout = limit_of(wait.timeout)
        return self._post(wait, self._group.allreduce([tensor], options))

    def send(self, wait: Wait, buffer: torch.Tensor, to: int, tag: int) -> Operation:
        """Post a message to one rank."""
        return self._post(wait, _Message(self._group.send([buffer], to, tag), wait))

    def receive(self, wait: Wait, buffer: torch.Tensor, source: int, tag: int) -> Operation:
        """Post the receipt of a message from one rank."""
        return self._post(wait, _Message(self._group.recv([buffer], source, tag), wait))

    def forget(self, operation: Operation) -> None:
        """The operation is over."""
        self._flying.discard(operation)
        operation.work = None

    @property
    def busy(self) -> bool:
        """Whether any operation is on its way."""
        return any(not operation.done() for operation in self._flying)

    def end(self) -> None:
        """Drop the group.

        An operation that has half a message of a rank that died does not end with its connections: the backend waits
        for the rest until its own limit, and dropping the group would wait with it. Such a group is never dropped; it
        holds a few threads and the numbers of closed connections.
        """
        if self.busy:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self.sockets.forget()
        for operation in list(self._flying):
            self.forget(operation)
        self._group = None


class _Message:
    """The handle of a message to or from one rank, which the backend knows to wait for and not to ask.

    A wait for it that is over breaks all connections of the group, so a thread waits as long as the backend can.
    """

    def __init__(self, work: Any, wait: Wait) -> None:
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(work.wait, limit_of(wait.timeout)), name="syncstate-message", daemon=True
        )
        self._thread.start()

    def _run(self, wait: Callable[[timedelta], object], limit: timedelta) -> None:
        try:
            wait(limit)
        except RuntimeError as error:
            self._error = error

    def wait(self, limit: timedelta) -> None:
        self._thread.join(limit.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError("the message is still on its way")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

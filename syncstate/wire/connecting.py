"""Making the private group: the one part of the backend that can neither be interrupted nor be told to give up."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from syncstate.topology import Topology
from syncstate.wire.meeting import Meeting
from syncstate.wire.verdict import Wait, late, unconnected

__all__ = ["connect"]

_SLICE_SECONDS = 0.1
_LONGEST_SECONDS = 60.0


def connect(meeting: Meeting, topology: Topology, timeout: float, lane: str) -> Any:
    """Connect the ranks of a meeting to each other; returns the process group.

    The backend waits for each rank in turn, and a rank that dies meanwhile is waited for many times over. So the group
    is made in a thread, and this rank stops waiting when it hears of a failure, is interrupted, or the time is over.
    What the thread then still makes is dropped when it is done.

    Args:
        meeting: Where the ranks met.
        topology: The group.
        timeout: Seconds that it may take.
        lane: What the group is called; each of a meeting's groups has another name.

    Raises:
        SyncStateError: A rank failed, died or did not answer.
    """
    wait = Wait("start: connecting the ranks", 0, min(timeout, _LONGEST_SECONDS), time.monotonic())
    made: dict[str, Any] = {}

    def make() -> None:
        try:
            store = dist.PrefixStore(f"gloo/{lane}", meeting.backend)
            limit = timedelta(seconds=wait.timeout)
            made["group"] = dist.ProcessGroupGloo(store, topology.rank, topology.world_size, limit)
        except Exception as error:
            made["error"] = error

    thread = threading.Thread(target=make, name="syncstate-connect", daemon=True)
    thread.start()
    while True:
        thread.join(_SLICE_SECONDS)
        if not thread.is_alive():
            break
        if meeting.board.alarmed():
            raise meeting.board.hear(0).error()
        if time.monotonic() - wait.begun >= wait.timeout:
            raise late(wait, meeting.board, topology, computes=False).error()
    if "error" in made:
        raise unconnected(wait, meeting.board, topology, made["error"]).error() from made["error"]
    return made.pop("group")

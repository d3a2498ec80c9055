"""Why a wait failed: what a rank says when an operation broke or its time is over."""

from typing import NamedTuple

from syncstate.topology import Topology
from syncstate.wire.notes import Note, NoteBoard

__all__ = ["Wait", "broken", "late"]


class Wait(NamedTuple):
    """What a rank waits for.

    Attributes:
        what: Such as `"sync of 'seed'"`.
        step: The engine's step, which the messages name.
        timeout: Seconds that it may take.
        begun: When it began, by `time.monotonic()`.
    """

    what: str
    step: int
    timeout: float
    begun: float

    def __str__(self) -> str:
        return f"{self.what} at step {self.step}"


def broken(wait: Wait, board: NoteBoard, topology: Topology, error: BaseException) -> Note:
    """An operation broke: the note of a rank that knew the cause, or one that names who left or is silent.

    Args:
        wait: What this rank waited for.
        board: The group's notes.
        topology: The group.
        error: What the backend said.
    """
    # A rank that ends in good order says so before it closes its connections, and one that fails before it does.
    if board.alarmed():
        return board.hear(wait.step)
    leavers = board.leavers()
    if leavers:
        left = "; ".join(f"rank {rank} ended at step {step}" for rank, step in sorted(leavers.items()))
        reason = f"{wait}: {left}, and rank {topology.rank} goes on. To stop together, share the decision to stop"
    else:
        _, silent = board.roll_call(wait.step)
        who = _silent(silent) if silent else "all ranks still answer"
        if board.lost is not None:
            who = (
                "the key-value store no longer answers either, so nobody can say which rank it was; the process that "
                "hosts the store, usually rank 0, may have died"
            )
        backend = str(error).split("\n", 1)[0].strip()[:160]
        reason = f"{wait}: the connection to another rank broke; {who} (the backend says: {backend})"
    return board.post(Note("peer", topology.rank, wait.step, reason))


def late(wait: Wait, board: NoteBoard, topology: Topology) -> Note:
    """The time is over: the note of a rank that knew the cause, or one that names who is silent.

    Args:
        wait: What this rank waited for.
        board: The group's notes.
        topology: The group.
    """
    seen, silent = board.roll_call(wait.step)
    rank, main = topology.rank, topology.main
    if silent:
        who = _silent(silent)
    else:
        who = "all ranks answer: " + ", ".join(f"rank {r} at step {step}" for r, step in sorted(seen.items()))
    hint = f"; rank {main} is the main process and computes before it sends" if main in silent else ""
    text = (
        f"{wait}: rank {rank} waited {wait.timeout:g} s; {who}{hint}. If this is expected, give the value or the "
        "engine a larger timeout"
    )
    return board.post(Note("timeout", rank, wait.step, text))


def _silent(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks))
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {named} did not report"

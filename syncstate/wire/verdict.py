"""Why a wait failed: what a rank says when an operation broke or its time is over."""

from typing import NamedTuple

from syncstate.topology import Topology
from syncstate.wire.notes import Note, NoteBoard
from syncstate.wire.store import gone

__all__ = ["DeathWatch", "Wait", "broken", "late", "unconnected"]

_LOOKS = 2


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


class DeathWatch:
    """Whether a rank has died, as far as connections tell.

    Ranks that have left in good order, with all that is waited for, end one connection each; a further one that is
    seen to have ended twice in a row is that of a rank that died.

    Args:
        board: The group's notes.
        step: This rank's step.
    """

    def __init__(self, board: NoteBoard, step: int) -> None:
        self._board, self._step = board, step
        self._seen = 0

    def sees(self, ended: int) -> bool:
        """Look once more, at the number of connections that have ended."""
        self._seen = self._seen + 1 if ended and ended > self._board.left_after(self._step) else 0
        return self._seen >= _LOOKS


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
    _, silent = board.roll_call(wait.step)
    left = _left(wait, board, silent)
    who = _who(board, silent, left) or "all ranks still answer"
    if left and not silent:
        who += f", and rank {topology.rank} goes on. To stop together, share the decision to stop"
    else:
        who = f"the connection to another rank broke; {who} (the backend says: {_first_line(error)})"
    return board.post(Note("peer", topology.rank, wait.step, f"{wait}: {who}"))


def unconnected(wait: Wait, board: NoteBoard, topology: Topology, error: BaseException) -> Note:
    """The backend could not connect this rank: because others are silent, or because of something on this rank.

    Args:
        wait: What this rank waited for.
        board: The group's notes.
        topology: The group.
        error: What the backend said.
    """
    if board.alarmed():
        return board.hear(wait.step)
    _, silent = board.roll_call(wait.step)
    who = _who(board, silent, {})
    text = f"{wait}: rank {topology.rank} could not connect{'; ' if who else ''}{who}"
    return board.post(Note("peer", topology.rank, wait.step, f"{text} (the backend says: {_first_line(error)})"))


def late(wait: Wait, board: NoteBoard, topology: Topology, *, computes: bool = True) -> Note:
    """The time is over: the note of a rank that knew the cause, or one that names who is silent.

    Args:
        wait: What this rank waited for.
        board: The group's notes.
        topology: The group.
        computes: Whether main may have to compute first, so that its silence means little.
    """
    seen, silent = board.roll_call(wait.step)
    rank, main = topology.rank, topology.main
    who = _who(board, silent, _left(wait, board, silent))
    advice = "If this is expected, give the value or the engine a larger timeout"
    if not who:
        who = "all ranks answer: " + ", ".join(f"rank {r} at step {step}" for r, step in sorted(seen.items()))
        advice = f"Every rank must make the same calls of the engine, in the same order. {advice}"
    if computes and main in silent and board.lost is None:
        who += f"; rank {main} is the main process and computes before it sends"
    text = f"{wait}: rank {rank} waited {wait.timeout:g} s; {who}. {advice}"
    return board.post(Note("timeout", rank, wait.step, text))


def _left(wait: Wait, board: NoteBoard, silent: list[int]) -> dict[int, int]:
    """The ranks whose leaving can be the reason, and their last step.

    One that had all that this rank waits for is not to blame where another rank is silent: that one may have died in
    the very last sync, when others had ended already.
    """
    return {rank: step for rank, step in sorted(board.leavers().items()) if not silent or step < wait.step}


def _who(board: NoteBoard, silent: list[int], left: dict[int, int]) -> str:
    """Who is missing, as far as this rank can know; "" where nobody is."""
    if board.lost is not None:  # then all ranks are silent
        return f"nobody can say which rank it was, because {gone(board.lost)}"
    told = [f"rank {rank} ended at step {step}" for rank, step in left.items()]
    if silent:
        named = ", ".join(map(str, silent))
        told.append(f"{'ranks' if len(silent) > 1 else 'rank'} {named} did not report")
    return "; ".join(told)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].strip()[:160]

"""Failure news: what ranks leave for each other in the key-value store of the process group.

A broadcast has no acknowledgement, and the text of a backend's error depends on where in its tree a rank stands. So the
first rank that knows of a failure raises the alarm and writes down the cause, and every other rank raises what the note
says. A rank that hears the alarm answers a roll-call first, so that the note can name the silent ones.
"""

import json
import time
import traceback
from dataclasses import asdict, dataclass, replace

from syncstate.errors import CodecError, ConfigError, MismatchError, PeerError, SyncStateError, SyncTimeout
from syncstate.wire.store import Store, StoreLost, gone

__all__ = ["Note", "NoteBoard", "describe_error", "fit", "traced"]

_CLASSES: dict[str, type[SyncStateError]] = {
    "codec": CodecError,
    "mismatch": MismatchError,
    "peer": PeerError,
    "timeout": SyncTimeout,
}
_ROLL_CALL_SECONDS = 1.0
_NOTE_SECONDS = 3.0  # from an alarm to its note, the roll-call included
_POLL_SECONDS = 0.01
_NOTE_BYTES = 65536  # a store does not take a content of any length
_CUT = "\n[...]\n"


def describe_error(error: BaseException) -> str:
    """The class and the message of an exception; errors travel as text, because a class may not be there elsewhere."""
    try:
        text = str(error)
    except Exception:  # its own fault must not hide it
        text = "(it cannot say what happened)"
    return f"{type(error).__name__}: {text}"


def traced(told: str, error: BaseException, rank: int) -> str:
    """What happened, and behind it the traceback on the rank where it did."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{told}\nTraceback on rank {rank}:\n{trace}"


def fit(text: str, room: int = _NOTE_BYTES) -> str:
    """A text that can be written down: what is no Unicode escaped, and cut in the middle if it is long.

    Args:
        text: Anything, such as the message of a user's exception.
        room: How many bytes it may take in UTF-8.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > room:
        half = (room - len(_CUT)) // 2
        # What is left of a character that was cut through says nothing.
        parts = [part.decode("utf-8", "ignore") for part in (data[:half], data[-half:])]
        return _CUT.join(parts)
    return data.decode("utf-8")


@dataclass(frozen=True)
class Note:
    """Why the engines of a group have ended.

    Attributes:
        kind: `"codec"`, `"mismatch"`, `"peer"` or `"timeout"`: the class that the other ranks raise.
        rank: Who wrote it.
        step: Its step then.
        text: What happened, whole.
    """

    kind: str
    rank: int
    step: int
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int, where: str = "") -> "Note":
        """What a rank leaves for the others when it ends because of an error.

        Args:
            error: The error. What the engine itself says has a class that all ranks raise; a `ConfigError` and what
                comes from the user is another rank's failure to them.
            rank: Whose it is.
            step: Its step.
            where: In which part of its work, such as `" in the resync"`.
        """
        if isinstance(error, SyncStateError) and not isinstance(error, ConfigError):
            kind = next((kind for kind, known in _CLASSES.items() if type(error) is known), "peer")
            return cls(kind, rank, step, str(error))
        return cls("peer", rank, step, f"rank {rank} failed{where} at step {max(step, 0)}: {describe_error(error)}")

    def error(self) -> SyncStateError:
        """What a rank that reads the note raises."""
        return _CLASSES.get(self.kind, PeerError)(self.text)


class NoteBoard:
    """One group's corner of the store.

    Args:
        store: The store, already prefixed so that nobody else writes here.
        rank, world_size: This process in the group.

    Attributes:
        lost: Why the store no longer answers; None while it does.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.lost: str | None = None

    def alarmed(self) -> bool:
        """Whether any rank has raised the alarm. One short question to the store."""
        try:
            return self._store.glance("alarm")
        except StoreLost as error:
            self._lose(error)
            return False

    def post(self, note: Note) -> Note:
        """Leave a note and raise the alarm; returns the note that stands, which is the first that anyone left.

        A long text is cut in the middle.
        """
        note = replace(note, text=fit(note.text))
        self._store.hurry()
        try:
            standing = self._store.compare_set("note", "", json.dumps(asdict(note)))
            self._store.set("alarm", "1")
        except StoreLost as error:
            self._lose(error)
            return note
        return Note(**json.loads(standing)) if standing else note

    def hear(self, step: int) -> Note:
        """After the alarm: answer the roll-call, and wait for the note.

        Args:
            step: This rank's step.
        """
        self._store.hurry()
        self._write("seen", step)
        end = time.monotonic() + _NOTE_SECONDS
        while True:
            try:
                if self._store.check(["note"]):
                    return Note(**json.loads(self._store.get("note")))
            except StoreLost as error:
                self._lose(error)
            if self.lost is not None:
                return Note("peer", self._rank, step, f"another rank failed; {gone(self.lost)}")
            if time.monotonic() >= end:
                return Note("peer", self._rank, step, "another rank failed and did not say why")
            time.sleep(_POLL_SECONDS)

    def roll_call(self, step: int) -> tuple[dict[int, int], list[int]]:
        """Raise the alarm and wait a second for the ranks to answer; returns their steps, and the silent ranks.

        Ranks that have signed off are not silent.

        Args:
            step: This rank's step.
        """
        self._store.hurry()
        self._write("seen", step)
        try:
            self._store.set("alarm", "1")
        except StoreLost as error:
            self._lose(error)
        end = time.monotonic() + _ROLL_CALL_SECONDS
        seen, left = self._steps("seen"), self._steps("left")
        while len(seen | left) < self._world_size and self.lost is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            seen, left = self._steps("seen"), self._steps("left")
        return seen, [rank for rank in range(self._world_size) if rank not in seen and rank not in left]

    def acknowledge(self, amount: int) -> int:
        """Count an acknowledgement of this rank; returns those of all ranks, with `amount` 0 without adding one."""
        try:
            return self._store.add("acknowledged", amount)
        except StoreLost as error:
            self._lose(error)
            return 0

    def sign_off(self, step: int) -> None:
        """Tell the others that this rank has ended in good order, and at which step."""
        self._write("left", step)

    def leavers(self) -> dict[int, int]:
        """Ranks that have signed off, and their last step."""
        return self._steps("left")

    def left_after(self, step: int) -> int:
        """How many ranks have signed off that have had all they need at this step."""
        return sum(last >= step for last in self.leavers().values())

    def _write(self, what: str, step: int) -> None:
        try:
            self._store.set(f"{what}/{self._rank}", str(step))
        except StoreLost as error:
            self._lose(error)

    def _steps(self, what: str) -> dict[int, int]:
        found: dict[int, int] = {}
        for rank in range(self._world_size):
            try:
                if self._store.check([f"{what}/{rank}"]):
                    found[rank] = int(self._store.get(f"{what}/{rank}"))
            except StoreLost as error:
                self._lose(error)
                break
        return found

    def _lose(self, error: BaseException) -> None:
        self.lost = str(error).split("\n", 1)[0][:200]

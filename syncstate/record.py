"""What is known of a value beside the value itself: its version, its steps, and what main sent."""

from typing import Any, NamedTuple

from syncstate.wire.codec import encode

__all__ = ["Info", "Record"]


class Info(NamedTuple):
    """What is known of a value without looking at it.

    Attributes:
        version: How often it was refreshed; 0 is the initial value or none.
        computed_at: The step of the engine call that computed it; None before the first.
        applied_at: The step of the engine call that put it into force; None before the first.
        nbytes: Size of the encoded value; 0 before the first.
    """

    version: int = 0
    computed_at: int | None = None
    applied_at: int | None = None
    nbytes: int = 0


class Record:
    """What the engine keeps of a value beside the value itself.

    Attributes:
        version: How often it was refreshed.
        steps: (computed at, applied at).
        sent: The value as main sent it; what this rank holds may be derived from it.
        announced: Where only main can follow the schedule: the next point, and the steps before it.
        ahead: On the main process, the values computed later that are not in force yet, oldest first.
    """

    __slots__ = ("ahead", "announced", "nbytes", "sent", "steps", "version")

    def __init__(self) -> None:
        self.version = 0
        self.steps: tuple[int | None, int | None] = (None, None)
        self.sent: Any = None
        self.ahead: list[Any] = []
        self.announced: tuple[int, int] | None = None
        self.nbytes: tuple[int, int] = (0, 0)  # (version, size): measured when somebody asks, not in every sync

    def put(self, sent: Any, steps: tuple[int | None, int | None], version: int) -> None:
        """A value comes into force."""
        self.version = version
        self.sent = sent
        self.steps = steps
        self.nbytes = (0, 0)

    def info(self, allow_pickle: bool) -> Info:
        """The record as users see it."""
        if self.nbytes[0] != self.version:
            self.nbytes = (self.version, len(encode(self.sent, allow_pickle=allow_pickle)))
        return Info(self.version, *self.steps, self.nbytes[1])

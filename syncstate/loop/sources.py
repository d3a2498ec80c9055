"""What happens on the main process before anything is sent: the sources run, and their values or errors are packed."""

import logging
import traceback
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from syncstate.context import Context
from syncstate.errors import CodecError, ComputeError, MismatchError, SyncStateError
from syncstate.loop.batch import Batch
from syncstate.loop.rules import Rules
from syncstate.spec import check_spec
from syncstate.wire.codec import Parcel, pack
from syncstate.wire.notes import describe_error, fit

__all__ = ["Failure", "Refused", "cannot_travel", "compute"]

_log = logging.getLogger("syncstate")


class Failure(NamedTuple):
    """Why main sends no values. Every rank gets it, raises the same error, and the engine goes on.

    Attributes:
        kind: `"compute"` or `"mismatch"`.
        text: The whole message.
        names: The values that failed.
        cause: Main's own exception behind it; None on the other ranks.
    """

    kind: str
    text: str
    names: list[str]
    cause: BaseException | None = None

    def kept(self, on_error: str) -> bool:
        """Whether the user chose to go on with the old values."""
        return on_error == "keep" and self.kind == "compute"

    def conclude(self, on_error: str) -> tuple[()]:
        """Raise the error that every rank raises, or log it where the old values are kept."""
        if self.kept(on_error):
            _log.error("the old values stay: %s", self.text)
            return ()
        raise self.error() from self.cause

    def error(self) -> SyncStateError:
        """The exception that every rank raises."""
        return (MismatchError if self.kind == "mismatch" else ComputeError)(self.text)

    def joined(self, other: "Failure | None") -> "Failure":
        """This failure, and another one of the same call."""
        if other is None:
            return self
        kind = self.kind if self.kind == other.kind else "compute"
        return Failure(kind, f"{self.text}\n{other.text}", self.names + other.names, self.cause or other.cause)

    @classmethod
    def read(cls, parts: Any) -> "Failure":
        """The failure that `pack` packed. Raises CodecError for something else."""
        if type(parts) is not list or [*map(type, parts)] != [str, str, list] or {*map(type, parts[2])} - {str}:
            raise CodecError("received an error that does not say what failed")
        return cls(*parts)

    def pack(self, room: int) -> Parcel:
        """The failure in at most `room` bytes, so that it fits the frame; a long text is cut in the middle."""
        names = self.names
        spare = room - 128 - sum(len(name.encode("utf-8", "surrogatepass")) + 8 for name in names)
        if spare < 256:
            names, spare = [], room - 128
        return pack([self.kind, fit(self.text, spare), names])


class Refused(Exception):
    """Main's side of a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class _Fault(NamedTuple):
    name: str
    kind: str
    text: str
    cause: BaseException | None


def compute(
    batch: Batch, fields: dict[str, Any], rules: Rules, rank: int, collected: Mapping[int, Any] | None = None
) -> list[Any]:
    """Compute all values of a batch; all or nothing.

    Args:
        batch: What is due.
        fields: What the contexts of these computations have in common.
        rules: The engine's.
        rank: This rank, for messages.
        collected: What the ranks collected, by index.

    Raises:
        Refused: A source raised, or a value differs from its spec.
    """
    values: list[Any] = []
    faults: list[_Fault] = []
    context, seed, world_size = Context.of, rules.seed, fields["world_size"]
    own = fields
    for index, (name, stream, source, record, spec, scattered) in enumerate(batch.jobs):
        previous, version = record.sent, record.version + 1
        if record.ahead:  # computed, and not in force yet
            previous, version = record.ahead[-1], version + len(record.ahead)
        if collected:
            own = {**fields, "collected": collected.get(index)}
        try:
            value = source(context(own, previous, seed, stream, version))
            if scattered:
                value = _items(value, world_size)
        except Exception as error:
            faults.append(_Fault(name, "compute", describe_error(error), error))
            continue
        if spec is not None:
            wrong = [told for one in (value if scattered else (value,)) if (told := check_spec(one, spec)) is not None]
            if wrong:
                faults.append(_Fault(name, "mismatch", wrong[0], None))
        values.append(value)
    if faults:
        raise _refused(faults, fields["step"], rank)
    return values


def _items(value: Any, world_size: int) -> list[Any]:
    """What a source of a scattered value returned, as a list with an item for each rank."""
    try:
        items = list(value)
    except TypeError:
        items = []
    if len(items) != world_size or isinstance(value, (str, bytes, Mapping, Set)):
        given = f"{type(value).__name__} of {len(items)}" if items else type(value).__name__
        raise ValueError(f'deliver="scatter" takes a sequence with an item for each of {world_size} ranks, got {given}')
    return items


def cannot_travel(batch: Batch, values: list[Any], error: CodecError, step: int, rank: int, pickle: bool) -> Refused:
    """Which values cannot be encoded, and why."""
    return _refused(_cannot_travel(batch, values, error, pickle), step, rank)


def _cannot_travel(batch: Batch, values: list[Any], error: CodecError, allow_pickle: bool) -> list[_Fault]:
    """Which values cannot be encoded: one by one, so that the paths begin inside the value."""
    faults = []
    for entry, value in zip(batch.entries, values, strict=True):
        try:
            pack(value, allow_pickle=allow_pickle)
        except CodecError as fault:
            faults.append(_Fault(entry.name, "compute", describe_error(fault), fault))
    return faults or [_Fault(", ".join(batch.names), "compute", describe_error(error), error)]


def _refused(faults: list[_Fault], step: int, rank: int) -> Refused:
    kind = "mismatch" if all(fault.kind == "mismatch" for fault in faults) else "compute"
    lines = [f"value {fault.name!r} at step {step} on main (rank {rank}): {fault.text}" for fault in faults]
    causes = [fault.cause for fault in faults if fault.cause is not None]
    if causes:
        lines.append(f"Traceback on rank {rank}:")
        lines.extend("".join(traceback.format_exception(cause)).rstrip() for cause in causes)
    names = [fault.name for fault in faults]
    return Refused(Failure(kind, "\n".join(lines), names, causes[0] if causes else None))

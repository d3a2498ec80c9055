"""The private groups of an engine: every message of syncstate runs here, none on the groups of the host."""

import atexit
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from syncstate.topology import Topology
from syncstate.wire.connecting import connect
from syncstate.wire.lane import SLICE, Lane, Operation
from syncstate.wire.meeting import Meeting, Patience
from syncstate.wire.notes import Note, NoteBoard
from syncstate.wire.sockets import Sockets
from syncstate.wire.verdict import DeathWatch, Wait, broken, late

__all__ = ["LOOK_SECONDS", "Channel", "Operation", "Wait"]

LOOK_SECONDS = 1.0  # how often a rank that does not wait looks for news of a failure
_ENDING_SECONDS = 0.3


class Channel:
    """Private gloo groups on the CPU, with their corner of the store. A group of one has neither and sends nothing.

    The groups are made here and not by `torch.distributed.new_group`: they are no entries of the global registry, so
    ranks outside the engine's group take no part, the names of later groups do not depend on them, and nothing but this
    object keeps them alive, which their teardown needs.

    Args:
        topology: The group.
        meeting: Where the ranks met; None for a group of one.
        lanes: One group for each; within a lane all ranks post their operations in the same order.

    Attributes:
        collectives: How many collectives this rank has issued.
    """

    def __init__(self, topology: Topology, meeting: Meeting | None, lanes: Sequence[str] = ("blocking",)) -> None:
        self.topology = topology
        self.collectives = 0
        self._acknowledged = 0
        self._look_at = 0.0
        self._names = tuple(lanes)
        self._lanes: dict[str, Lane] = {}
        self._meeting = meeting
        self._board = None if meeting is None else meeting.board

    def connect(self, timeout: float) -> None:
        """Make the groups. Collective.

        Args:
            timeout: Seconds that it may take.

        Raises:
            SyncStateError: A rank failed, died or did not answer.
        """
        if self._meeting is None:
            return
        _open.add(self)
        for name in self._names:
            with Sockets(self.topology.world_size - 1) as sockets:
                group = connect(self._meeting, self.topology, timeout, name)
            sockets.agree(self._meeting, name)
            self._lanes[name] = Lane(group, sockets)
        self._meeting.ended = self._ended

    @property
    def lost(self) -> str | None:
        """Why the store no longer answers; None while it does."""
        return None if self._board is None else self._board.lost

    def broadcast(
        self, buffer: torch.Tensor, wait: Wait, meanwhile: Callable[[], object] | None = None, root: int | None = None
    ) -> None:
        """Send `buffer` from main to every rank, into buffers of the same size, and wait until it is here.

        Args:
            buffer: A 1-D contiguous CPU tensor of uint8.
            wait: What to say when it fails.
            meanwhile: Work to do while the bytes are on the wire.
            root: The rank that sends; None is the main process.

        Raises:
            SyncStateError: What the first rank that knew the cause wrote down.
        """
        self.finish(self.begin_broadcast(buffer, wait, root=root), meanwhile)

    def begin_broadcast(
        self, buffer: torch.Tensor, wait: Wait, *, lane: str = "blocking", root: int | None = None
    ) -> Operation:
        """Post a broadcast; see `broadcast`. The buffer must stay as it is until `finish`."""
        sender = self.topology.main if root is None else root
        self.collectives += bool(self._lanes)
        return self._begin(lane, wait, Lane.broadcast, buffer, sender)

    def begin_gather(
        self, buffer: torch.Tensor, outputs: list[torch.Tensor] | None, wait: Wait, *, lane: str = "blocking"
    ) -> Operation:
        """Post a gather to main of equally large buffers; `outputs` has one for each rank on main, None elsewhere."""
        if not self._lanes and outputs is not None:
            outputs[0].copy_(buffer)
        self.collectives += bool(self._lanes)
        return self._begin(lane, wait, Lane.gather, buffer, outputs, self.topology.main)

    def begin_scatter(
        self, buffer: torch.Tensor, inputs: list[torch.Tensor] | None, wait: Wait, *, lane: str = "blocking"
    ) -> Operation:
        """Post a scatter from main of equally large buffers; `inputs` has one for each rank on main, None elsewhere."""
        if not self._lanes and inputs is not None:
            buffer.copy_(inputs[0])
        self.collectives += bool(self._lanes)
        return self._begin(lane, wait, Lane.scatter, buffer, inputs, self.topology.main)

    def begin_all_reduce(self, tensor: torch.Tensor, wait: Wait, *, lane: str = "blocking") -> Operation:
        """Post a sum over all ranks, in place, of a contiguous tensor."""
        self.collectives += bool(self._lanes)
        return self._begin(lane, wait, Lane.all_reduce, tensor)

    def begin_send(self, buffer: torch.Tensor, to: int, tag: int, wait: Wait, *, lane: str = "blocking") -> Operation:
        """Post a message to one rank of the group; no collective."""
        return self._begin(lane, wait, Lane.send, buffer, to, tag)

    def begin_receive(
        self, buffer: torch.Tensor, source: int, tag: int, wait: Wait, *, lane: str = "blocking"
    ) -> Operation:
        """Post the receipt of a message of exactly this size from one rank of the group; no collective."""
        return self._begin(lane, wait, Lane.receive, buffer, source, tag)

    def _begin(self, lane: str, wait: Wait, post: Callable[..., Operation], *what: object) -> Operation:
        board = self._board
        if board is None or not self._lanes:
            return Operation(wait)
        try:
            return post(self._lanes[lane], wait, *what)
        except RuntimeError as error:
            raise broken(wait, board, self.topology, error).error() from error

    def finish(self, operation: Operation, meanwhile: Callable[[], object] | None = None) -> None:
        """Wait for an operation.

        Args:
            operation: What was posted.
            meanwhile: Work to do while the bytes are on the wire.

        Raises:
            SyncStateError: What the first rank that knew the cause wrote down.
        """
        if meanwhile is not None:
            meanwhile()
        lane, board, wait = operation.lane, self._board, operation.wait
        if lane is None or board is None or operation.work is None:
            return
        operation.linger()
        watch = DeathWatch(board, wait.step)
        while not self._arrived(operation, wait, board):
            if board.alarmed():
                raise board.hear(wait.step).error()
            if time.monotonic() - wait.begun >= wait.timeout:
                raise late(wait, board, self.topology).error()
            # The backend never ends an operation that has half a message of a rank that died.
            if watch.sees(lane.sockets.ended()):
                raise broken(wait, board, self.topology, RuntimeError("connection closed")).error()
        lane.forget(operation)

    def _arrived(self, operation: Operation, wait: Wait, board: NoteBoard) -> bool:
        """Wait for the operation for a slice of time: the backend's own wait hides signals and the notes of others."""
        try:
            operation.work.wait(SLICE)
        except RuntimeError:
            # A slice that is over leaves the operation running; anything else has ended it.
            if not operation.work.is_completed():
                return False
        else:
            return True
        try:
            operation.work.wait(SLICE)  # it may have ended well just after the slice
        except RuntimeError as error:
            raise broken(wait, board, self.topology, error).error() from error
        return True

    def acknowledge(self) -> None:
        """Say that this rank has done what it can fail at by itself after a broadcast; see `settle`."""
        if self._board is not None:
            self._acknowledged += 1
            self._board.acknowledge(1)

    def settle(self, wait: Wait, *, leaving: bool = False) -> None:
        """Wait until every rank has acknowledged as often as this one.

        A broadcast tells main nothing about its receivers. Where they can fail, main asks before it sends again, and
        every rank before it leaves; by then the others have long answered.

        Args:
            wait: What to say when it fails.
            leaving: Whether this rank ends here. Then it does not matter that the store has gone: the rank that hosts
                it may have left before.

        Raises:
            SyncStateError: A rank failed or did not answer.
        """
        board, patience = self._board, Patience(wait.timeout)
        if board is None or not self._lanes:
            return
        wanted = self._acknowledged * self.topology.world_size
        while board.acknowledge(0) < wanted:
            if board.alarmed():
                raise board.hear(wait.step).error()
            if leaving and board.lost is not None and not self._silent():
                return
            # A rank that left in good order has acknowledged before, so the count is looked at once more.
            if board.lost is not None or (self._ended() and board.acknowledge(0) < wanted):
                raise broken(wait, board, self.topology, RuntimeError(board.lost or "connection closed")).error()
            if not patience.pause():
                raise late(wait, board, self.topology).error()

    def _silent(self) -> bool:
        """Whether the store is still there and does not answer."""
        return self._meeting is not None and self._meeting.store.lost is not None

    def _ended(self) -> int:
        """How many ranks have ended their connections to this one."""
        return max((lane.sockets.ended() for lane in self._lanes.values()), default=0)

    def listen(self, step: int) -> None:
        """Hear of failures on other ranks. One short question to the store.

        Args:
            step: This rank's step, for the roll-call.

        Raises:
            SyncStateError: What another rank has written down.
        """
        if self._board is not None and self._board.alarmed():
            raise self._board.hear(step).error()

    def glance(self, step: int) -> None:
        """`listen`, but no more than once a second; for ranks that have something else to do than to wait."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self.listen(step)

    def tell(self, note: Note) -> Note:
        """Leave a note for the other ranks; returns the one that stands, which may be another rank's."""
        return note if self._board is None else self._board.post(note)

    def sign_off(self, step: int) -> None:
        """Tell the others that this rank ends in good order, before `teardown`."""
        if self._board is not None:
            self._board.sign_off(step)

    @property
    def busy(self) -> bool:
        """Whether any operation is on its way."""
        return any(lane.busy for lane in self._lanes.values())

    def teardown(self, *, abrupt: bool) -> None:
        """Drop the groups. A teardown that was interrupted can be called again.

        Args:
            abrupt: Operations may be in flight. They are ended, and the neighbours hear of it.
        """
        if abrupt:
            # Shutting connections ends an operation that waits for its neighbours, not one that has yet to begin.
            self._calm(SLICE.total_seconds())
            for lane in self._lanes.values():
                lane.sockets.shut()
            self._calm(_ENDING_SECONDS)
        while self._lanes:  # what is interrupted in the middle is found here again
            name = next(iter(self._lanes))
            self._lanes[name].end()
            del self._lanes[name]
        _open.discard(self)
        if self._meeting is not None:
            self._meeting.ended = None
            self._meeting.depart()
            self._meeting = None

    def _calm(self, seconds: float) -> None:
        """Wait until nothing is on its way, but not long."""
        end = time.monotonic() + seconds
        while self.busy and time.monotonic() < end:
            time.sleep(0.005)


_open: "weakref.WeakSet[Channel]" = weakref.WeakSet()


@atexit.register
def _end_what_is_open() -> None:
    """A process that ends without closing its engine must not wait for operations that nobody will finish."""
    for channel in list(_open):
        if channel.busy:
            channel.teardown(abrupt=True)

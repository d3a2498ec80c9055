"""The private process group of an engine: every message of syncstate runs here, none on the groups of the host."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from syncstate.topology import Topology
from syncstate.wire.connecting import connect
from syncstate.wire.meeting import Meeting, Patience
from syncstate.wire.notes import Note, NoteBoard
from syncstate.wire.sockets import Sockets
from syncstate.wire.verdict import Wait, broken, late

__all__ = ["Channel", "Wait"]

_SLICE = timedelta(milliseconds=100)
_SPARE_SECONDS = 30.0


class Channel:
    """A private gloo group on the CPU, with its corner of the store. A group of one has neither and sends nothing.

    The group is made here and not by `torch.distributed.new_group`: it is no entry of the global registry, so ranks
    outside the engine's group take no part, the names of later groups do not depend on it, and nothing but this object
    keeps it alive, which its teardown needs.

    Args:
        topology: The group.
        meeting: Where the ranks met; None for a group of one.

    Attributes:
        collectives: How many collectives this rank has issued.
    """

    def __init__(self, topology: Topology, meeting: Meeting | None) -> None:
        self.topology = topology
        self.collectives = 0
        self._acknowledged = 0
        self._limits: dict[float, timedelta] = {}  # one for each timeout of the plan
        self._group: Any = None
        self._meeting = meeting
        self._board = None if meeting is None else meeting.board
        self._sockets: Sockets | None = None
        self._work: Any = None  # the operation in flight; here and not in a frame, which a traceback would keep

    def connect(self, timeout: float) -> None:
        """Make the group. Collective.

        Args:
            timeout: Seconds that it may take.

        Raises:
            SyncStateError: A rank failed, died or did not answer.
        """
        if self._meeting is not None:
            with Sockets(self.topology.world_size - 1) as self._sockets:
                self._group = connect(self._meeting, self.topology, timeout)

    @property
    def lost(self) -> str | None:
        """Why the store no longer answers; None while it does."""
        return None if self._board is None else self._board.lost

    def broadcast(
        self, buffer: torch.Tensor, wait: Wait, meanwhile: Callable[[], object] | None = None, root: int | None = None
    ) -> None:
        """Send `buffer` from main to every rank, into buffers of the same size.

        Args:
            buffer: A 1-D contiguous CPU tensor of uint8.
            wait: What to say when it fails.
            meanwhile: Work to do while the bytes are on the wire.
            root: The rank that sends; None is the main process.

        Raises:
            SyncStateError: What the first rank that knew the cause wrote down.
        """
        board = self._board
        if self._group is None or board is None:
            if meanwhile is not None:
                meanwhile()
            return
        self.collectives += 1
        # The operation outlives our own deadline, because one that times out by itself closes the connection.
        limit = self._limits.get(wait.timeout)
        if limit is None:
            limit = self._limits[wait.timeout] = timedelta(seconds=wait.timeout + _SPARE_SECONDS)
        try:
            self._work = self._group.broadcast(buffer, self.topology.main if root is None else root, limit)
        except RuntimeError as error:
            raise broken(wait, board, self.topology, error).error() from error
        if meanwhile is not None:
            meanwhile()
        while not self._arrived(wait, board):
            if board.alarmed():
                raise board.hear(wait.step).error()
            if time.monotonic() - wait.begun >= wait.timeout:
                raise late(wait, board, self.topology).error()
        self._work = None

    def _arrived(self, wait: Wait, board: NoteBoard) -> bool:
        """Wait for the operation for a slice of time: the backend's own wait hides signals and the notes of others."""
        try:
            self._work.wait(_SLICE)
        except RuntimeError as error:
            # A slice that is over leaves the operation running; anything else has ended it.
            if not self._work.is_completed():
                return False
            if not self._work.is_success():
                raise broken(wait, board, self.topology, error).error() from error
        return True

    def acknowledge(self) -> None:
        """Say that this rank has done what it can fail at by itself after a broadcast; see `settle`."""
        if self._board is not None:
            self._acknowledged += 1
            self._board.acknowledge(1)

    def settle(self, wait: Wait) -> None:
        """Wait until every rank has acknowledged as often as this one.

        A broadcast tells main nothing about its receivers. Where they can fail, main asks before it sends again, and
        every rank before it leaves; by then the others have long answered.

        Args:
            wait: What to say when it fails.

        Raises:
            SyncStateError: A rank failed or did not answer.
        """
        board, sockets, patience = self._board, self._sockets, Patience(wait.timeout)
        if board is None or sockets is None:
            return
        wanted = self._acknowledged * self.topology.world_size
        while board.acknowledge(0) < wanted:
            if board.alarmed():
                raise board.hear(wait.step).error()
            # A rank that left in good order has acknowledged before, so the count is looked at once more.
            if board.lost is not None or (sockets.broken() and board.acknowledge(0) < wanted):
                raise broken(wait, board, self.topology, RuntimeError(board.lost or "connection closed")).error()
            if not patience.pause():
                raise late(wait, board, self.topology).error()

    def news(self, step: int) -> Note | None:
        """The note of a failure, if a rank has left one. One short question to the store.

        Args:
            step: This rank's step, for the roll-call.
        """
        return self._board.hear(step) if self._board is not None and self._board.alarmed() else None

    def tell(self, kind: str, step: int, text: str) -> Note:
        """Leave a note for the other ranks; returns the one that stands, which may be another rank's."""
        note = Note(kind, self.topology.rank, step, text)
        return note if self._board is None else self._board.post(note)

    def sign_off(self, step: int) -> None:
        """Tell the others that this rank ends in good order, before `teardown`."""
        if self._board is not None:
            self._board.sign_off(step)

    def teardown(self, *, abrupt: bool) -> None:
        """Drop the group.

        Args:
            abrupt: An operation may be in flight, and frames of a traceback may hold it. Dropping the group would block
                until the operation times out; without its connections it ends now, and the neighbours hear of it.
        """
        if abrupt and self._work is not None:
            # Shutting the connections ends an operation that waits for its neighbours, not one that has yet to begin.
            with suppress(RuntimeError):
                self._work.wait(_SLICE)
        if self._sockets is not None:
            if abrupt:
                self._sockets.shut()
            self._sockets.forget()
        self._group = self._work = None
        if self._meeting is not None:
            self._meeting.depart()
            self._meeting = None

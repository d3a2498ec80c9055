"""The connection of a resync that stands alone; inside an engine the engine's serves."""

from typing import Any

from syncstate.digest import digest_text
from syncstate.errors import ConfigError, MismatchError, PeerError, SyncStateError
from syncstate.loop.difference import differences, plan_text
from syncstate.resync.choice import Choice
from syncstate.resync.session import Session
from syncstate.topology import Topology
from syncstate.wire.channel import Channel
from syncstate.wire.meeting import store_lost
from syncstate.wire.notes import Note, describe_error
from syncstate.wire.rendezvous import meet

__all__ = ["Connection"]


class Connection:
    """A private channel of its own. Making one is collective.

    Args:
        topology: The group.
        choice: What the resync is to do, which all ranks must agree on.
        timeout: Seconds that each wait may take.
        group: The process group for bulk on accelerators.
        on_device: For tests; see `Session`.

    Raises:
        MismatchError: The ranks are to do different things.
        SyncTimeout: A rank did not come.

    Attributes:
        session: What runs over it.
        ended: Why it is over; None while it is not.
    """

    def __init__(
        self, topology: Topology, choice: Choice, timeout: float, group: Any = None, *, on_device: bool = False
    ) -> None:
        self.ended: BaseException | None = None
        self._topology = topology
        meeting = meet(topology, timeout) if topology.world_size > 1 else None
        if meeting is not None:
            text = plan_text({"resync": choice.plan})
            groups = meeting.compare("resync: start", digest_text(text).hex(), text)
            if len(groups) > 1:
                meeting.depart()
                raise MismatchError("resync: the plans of the ranks differ:\n  " + differences(groups))
        self._channel = Channel(topology, meeting)
        try:
            self._channel.connect(timeout)
        except BaseException as error:
            self._tell(error, 0)
            self._channel.teardown(abrupt=True)
            raise
        self.session = Session(topology, self._channel, meeting, timeout, group, on_device=on_device)

    def look(self, step: int) -> None:
        """Once a second, hear of failures on other ranks.

        Raises:
            SyncStateError: What another rank wrote down.
        """
        self._channel.glance(step)

    def end(self, error: BaseException, step: int) -> SyncStateError | None:
        """Tell the other ranks, unless they know, and drop the channel.

        Returns:
            What another rank has told before, or that the store is gone; else None.
        """
        note = self._tell(error, step)
        self.ended = error if isinstance(error, Exception) else PeerError(f"the resync ended: {describe_error(error)}")
        self.session.close(abrupt=True, step=step)
        self._channel.teardown(abrupt=True)
        if self._channel.lost is not None:
            return store_lost(f"resync at step {step}", self._topology.rank, self._channel.lost)
        return None if note.rank == self._topology.rank else note.error()

    def close(self, step: int) -> None:
        """Leave in good order."""
        self.ended = ConfigError("the resync is closed")
        self._channel.sign_off(step)
        self.session.close(abrupt=False, step=step)
        self._channel.teardown(abrupt=False)

    def _tell(self, error: BaseException, step: int) -> Note:
        note = Note.of(error, self._topology.rank, step, " in the resync")
        session = getattr(self, "session", None)
        if session is not None:
            session.tell(note)
        return self._channel.tell(note)

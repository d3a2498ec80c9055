"""The connections of one gloo group, which torch does not hand out: found by what appeared while the group was made."""

import json
import os
import select
import socket
import stat
import weakref
from collections.abc import Iterable

from syncstate.wire.meeting import Meeting, Patience
from syncstate.wire.store import StoreLost

__all__ = ["Sockets"]

_AGREE_SECONDS = 10.0
_Ends = tuple[str, str]  # the address of this side and of the other one


class Sockets:
    """A context in which a group is made; afterwards it knows the group's connected sockets.

    Args:
        expected: How many connections the group has: one to each other rank. Where another number appeared, another
            thread was opening connections too, and none are touched until `agree` has found out whose they are.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._before: set[tuple[int, int]] = set()
        self._found: dict[int, int] = {}
        self._inodes: dict[int, int] = {}

    def __enter__(self) -> "Sockets":
        self._before = set(_sockets().items())
        return self

    def __exit__(self, *_: object) -> None:
        # The listener must not be touched: shutting it down aborts the process.
        self._found = {fd: inode for fd, inode in _sockets().items() if (fd, inode) not in self._before and _ends(fd)}
        if len(self._found) == self._expected:
            self._keep(self._found)
        _alive.add(self)

    def agree(self, meeting: Meeting, lane: str) -> None:
        """Tell the other ranks which connections appeared here, and find this rank's among too many. Collective.

        A connection belongs to the group if another rank has its other end.

        Args:
            meeting: Where the ranks meet.
            lane: What the group is called.

        Raises:
            SyncStateError: A rank failed meanwhile.
        """
        topology = meeting.topology
        ends = {fd: _ends(fd) for fd in self._found}
        try:
            told = json.dumps([pair for pair in ends.values() if pair])
            meeting.store.set(f"sockets/{lane}/{topology.rank}", told)
            if len(self._found) > self._expected:
                others = [rank for rank in range(topology.world_size) if rank != topology.rank]
                keys = [f"sockets/{lane}/{rank}" for rank in others]
                patience = Patience(_AGREE_SECONDS)
                while not meeting.store.check(keys):
                    if meeting.board.alarmed():
                        raise meeting.board.hear(0).error()
                    if not patience.pause():
                        return
                heard = [json.loads(meeting.store.get(key)) for key in keys]
                self._keep({fd: self._found[fd] for theirs in heard for fd in _shared(ends, theirs)})
        except StoreLost:  # then the connections stay unknown; what comes next will say so
            return

    def _keep(self, inodes: dict[int, int]) -> None:
        self._inodes = inodes
        for fd in inodes:
            # A program that this process starts, and that lives on, would keep the connections of a dead rank open.
            try:
                os.set_inheritable(fd, False)
            except OSError:
                continue

    def shut(self) -> None:
        """End all operations in flight at once, here and on the neighbours."""
        for fd, inode in self._inodes.items():
            # First duplicated, then looked at: the backend's thread may close it at any moment, when it hears of the
            # end of the other side, and the number may belong to somebody else afterwards.
            try:
                duplicate = os.dup(fd)
            except OSError:
                continue
            if _inode(duplicate) != inode:
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as connection:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def ended(self) -> int:
        """How many connections have ended, because their other sides have died or left. Reads nothing from them."""
        poll, count = select.poll(), 0
        for fd, inode in self._inodes.items():
            if _inode(fd) == inode:
                poll.register(fd, select.POLLRDHUP)
            else:  # the backend has heard of it, and closed it
                count += 1
        over = select.POLLRDHUP | select.POLLHUP | select.POLLERR
        return count + sum(bool(events & over) for _, events in poll.poll(0))

    def forget(self) -> None:
        """The group is gone, and its descriptors with it."""
        self._inodes = {}

    def _after_fork(self) -> None:
        # A forked child, such as a worker of a data loader, would keep the connections of a dead rank open. The numbers
        # stay occupied, because the copied group object still believes that they are its own.
        for fd, inode in self._inodes.items():
            if _inode(fd) == inode:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, fd)
                os.close(null)


_alive: "weakref.WeakSet[Sockets]" = weakref.WeakSet()


def _close_in_child() -> None:
    for sockets in list(_alive):
        sockets._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _sockets() -> dict[int, int]:
    """Descriptor -> inode of the sockets of this process; empty where the system does not list them."""
    found: dict[int, int] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        inode = _inode(int(name))
        if inode is not None:
            found[int(name)] = inode
    return found


def _inode(fd: int) -> int | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _ends(fd: int) -> _Ends | None:
    """The addresses of a connection over TCP; None for anything else."""
    try:
        with socket.socket(fileno=os.dup(fd)) as candidate:
            if candidate.family not in (socket.AF_INET, socket.AF_INET6) or candidate.type != socket.SOCK_STREAM:
                return None
            return _text(candidate.getsockname()), _text(candidate.getpeername())
    except OSError:
        return None


def _text(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"{host.removeprefix('::ffff:')} {port}"


def _shared(ends: dict[int, _Ends | None], theirs: Iterable[list[str]]) -> list[int]:
    """The connection between this rank and another, if there is one alone; what else they share, nobody can tell."""
    others = {(there, here) for here, there in theirs}
    found = [fd for fd, pair in ends.items() if pair in others]
    return found if len(found) == 1 else []

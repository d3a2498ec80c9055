"""The connections of one gloo group, which torch does not hand out: found by what appeared while the group was made."""

import os
import select
import socket
import stat
import weakref

__all__ = ["Sockets"]


class Sockets:
    """A context in which a group is made; afterwards it knows the group's connected sockets.

    Args:
        expected: How many connections the group has: one to each other rank. Where another number appeared, another
            thread was opening connections too, and none are touched.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._before: set[tuple[int, int]] = set()
        self._inodes: dict[int, int] = {}

    def __enter__(self) -> "Sockets":
        self._before = set(_sockets().items())
        return self

    def __exit__(self, *_: object) -> None:
        # The listener must not be touched: shutting it down aborts the process.
        new = {fd: inode for fd, inode in _sockets().items() if (fd, inode) not in self._before and _connected(fd)}
        self._inodes = new if len(new) == self._expected else {}
        _alive.add(self)

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

    def broken(self) -> bool:
        """Whether a connection has ended, because its other side has died or left. Reads nothing from it."""
        poll = select.poll()
        for fd, inode in self._inodes.items():
            if _inode(fd) != inode:  # the backend has heard of it, and closed it
                return True
            poll.register(fd, select.POLLRDHUP)
        return any(events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

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


def _connected(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as candidate:
            candidate.getpeername()
    except OSError:
        return False
    return True

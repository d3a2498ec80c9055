"""A place in the store of the process group where the ranks of one engine compare what they hold."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from syncstate.errors import PeerError, SyncStateError
from syncstate.topology import Topology
from syncstate.wire.notes import Note, NoteBoard, describe_error
from syncstate.wire.store import Store, StoreLost, gone
from syncstate.wire.verdict import DeathWatch, Wait, broken

__all__ = ["HOST", "Groups", "Meeting", "Patience", "store_lost"]

HOST = 0  # the rank that reads what the others leave; not the main process, on which the ranks may not agree yet

Groups = dict[str, tuple[list[int], str]]


def store_lost(what: str, rank: int, error: object) -> PeerError:
    """What to raise when the store does not answer."""
    return PeerError(f"{what}: seen from rank {rank}, {gone(error)}")


class Patience:
    """Pauses between two looks at the store, until a deadline.

    Args:
        seconds: How long to go on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._pause = 0.002

    def pause(self) -> bool:
        """Wait a little, longer each time, so that many ranks do not keep the store busy; False after the deadline."""
        if time.monotonic() >= self._end:
            return False
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, 0.1)
        return True


class Meeting:
    """A place in the store that only the ranks of one engine know.

    Args:
        topology: The group.
        store: The store, prefixed with the place.
        timeout: Seconds that each comparison may take.
        backend: A client of its own, with the same prefix, which the backend's waits may lock. Not made while a group
            is made, because its connection would be taken for one of the group.

    Attributes:
        store: The prefixed store, for what else the group leaves there.
        board: The notes of failures.
        backend: As given.
    """

    def __init__(self, topology: Topology, store: Store, timeout: float, backend: Any) -> None:
        self.topology = topology
        self.store = store
        self.backend = backend
        self.board = NoteBoard(store, topology.rank, topology.world_size)
        # Set by the channel that connects the ranks: how many have ended their connections to this one.
        self.ended: Callable[[], int] | None = None
        self._timeout = timeout
        self._round = 0

    def part(self, name: str, topology: Topology) -> "Meeting":
        """A place inside this one for some of the ranks.

        Args:
            name: Of the place, which no other ranks use.
            topology: The group of those ranks.
        """
        store = self.store.under(lambda raw: dist.PrefixStore(name, raw))
        return Meeting(topology, store, self._timeout, dist.PrefixStore(name, self.backend))

    def compare(self, what: str, record: str, text: str = "", step: int | None = None) -> Groups:
        """Compare what the ranks hold; every rank gets the same answer. Collective, through the store alone.

        Args:
            what: What is compared, for messages.
            record: A short text, such as a digest. The host reads one from each rank.
            text: What the record stands for; read only where records differ, once for each of them.
            step: This rank's step, for messages; None before there is one.

        Returns:
            For each distinct record the ranks that hold it, and its text. One entry means that all agree.

        Raises:
            SyncStateError: A rank did not come in time, which is named, or failed.
        """
        where, now = (what, 0) if step is None else (f"{what} at step {step}", step)
        try:
            return self._compare(where, Wait(what, now, self._timeout, time.monotonic()), record, text)
        except SyncStateError:
            raise
        except StoreLost as error:
            raise store_lost(where, self.topology.rank, error) from error
        except BaseException as error:  # such as Ctrl-C; the others wait for this rank
            text = f"{where}: rank {self.topology.rank} failed at step {max(now, 0)}: {describe_error(error)}"
            self.board.post(Note("peer", self.topology.rank, now, text))
            raise

    def _compare(self, where: str, wait: Wait, record: str, text: str) -> Groups:
        self._round += 1
        topic, rank, everyone = f"round/{self._round}", self.topology.rank, range(self.topology.world_size)
        self.store.set(f"{topic}/{rank}", record)
        if rank == HOST:
            keys = [f"{topic}/{r}" for r in everyone]
            self._await(keys, where, wait)
            groups: dict[str, list[int]] = {}
            for r, key in enumerate(keys):
                groups.setdefault(self.store.get(key).decode(), []).append(r)
            self.store.set(f"{topic}/verdict", json.dumps(groups))
            self._forget(self._round - 1)  # which all ranks have left behind, or they would not be here
        else:
            self._await([f"{topic}/verdict"], where, wait)
            groups = json.loads(self.store.get(f"{topic}/verdict"))
        if len(groups) == 1:
            return {record: (groups[record], text)}
        if rank == groups[record][0]:
            self.store.set(f"{topic}/text/{rank}", text)
        self._await([f"{topic}/text/{ranks[0]}" for ranks in groups.values()], where, wait)
        return {r: (ranks, self.store.get(f"{topic}/text/{ranks[0]}").decode()) for r, ranks in groups.items()}

    def _await(self, keys: list[str], where: str, wait: Wait) -> None:
        """Wait for keys, or for news of a failure."""
        # The host gives up first and names the missing ranks; the others wait a little longer, to hear it.
        patience = Patience(self._timeout + (0.0 if self.topology.rank == HOST else 3.0))
        watch = DeathWatch(self.board, wait.step)
        while not self.store.check(keys):
            if self.board.alarmed():
                raise self.board.hear(wait.step).error()
            if self.ended is not None and watch.sees(self.ended()):
                raise broken(wait, self.board, self.topology, RuntimeError("connection closed")).error()
            if not patience.pause():
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                who = ", ".join(map(str, missing)) if self.topology.rank == HOST else str(HOST)
                text = f"{where}: rank {self.topology.rank} waited {self._timeout:g} s for rank {who}, who did not come"
                raise self.board.post(Note("timeout", self.topology.rank, wait.step, text)).error()

    def _forget(self, number: int) -> None:
        topic = f"round/{number}"
        for rank in range(self.topology.world_size):
            self.store.delete_key(f"{topic}/{rank}")
            self.store.delete_key(f"{topic}/text/{rank}")
        self.store.delete_key(f"{topic}/verdict")

    def depart(self) -> None:
        """Leave the place for good; the last rank to do so removes everything from it."""
        try:
            if self.store.add("departed", 1) == self.topology.world_size:
                for key in self.store.list_keys():
                    self.store.delete_key(key)
        except StoreLost:  # a store that is gone needs no housekeeping
            return
        finally:
            self.store.leave()

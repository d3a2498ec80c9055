"""How the ranks of a group find each other in the store before they share anything, and what they agree on there.

No collective runs before every rank has arrived and has the same plan. Ranks that are missing are named, records that
differ are compared, and an attempt that failed leaves nothing behind that a second one could stumble over.
"""

import json
import time
import uuid
from typing import Any

import torch.distributed as dist

from syncstate.errors import PeerError, SyncTimeout
from syncstate.topology import Topology

__all__ = ["Meeting", "meet"]

_POLL_SECONDS = 0.005
_LONGEST_PAUSE = 0.1  # many ranks that wait long must not keep the store busy
_NO_TOKEN = "-"  # no rank's token; what the store answers where there is none


class Meeting:
    """A place in the store that only the ranks of one group know, once all of them are there.

    Args:
        topology: The group.
        store: A client of its own, prefixed with the place.
        timeout: Seconds that each wait may take.

    Attributes:
        store: The prefixed store, for what else the group leaves there.
    """

    def __init__(self, topology: Topology, store: Any, timeout: float) -> None:
        self.topology = topology
        self.store = store
        self.timeout = timeout

    def agree(self, topic: str, record: str, text: str = "") -> dict[str, tuple[list[int], str]]:
        """Compare what the ranks hold; every rank gets the same answer.

        Args:
            topic: A name that this meeting has not used yet.
            record: A short text, such as a digest. Main reads one from each rank.
            text: What the record stands for; read only where records differ, once for each of them.

        Returns:
            For each distinct record the ranks that hold it, and its text. One entry means that all agree.

        Raises:
            SyncTimeout: A rank did not come; names it.
        """
        rank, everyone = self.topology.rank, range(self.topology.world_size)
        mine = f"{topic}/{rank}"
        self.store.set(mine, record)
        if self.topology.is_main:
            groups: dict[str, list[int]] = {}
            missing = _await_all(self.store, [f"{topic}/{r}" for r in everyone], self.timeout)
            if missing:
                self.store.set(f"{topic}/verdict", json.dumps({"missing": missing}))
                raise SyncTimeout(_missing_text(missing, self.timeout))
            for r in everyone:
                groups.setdefault(self.store.get(f"{topic}/{r}").decode(), []).append(r)
            self.store.set(f"{topic}/verdict", json.dumps({"groups": groups}))
        else:
            verdict = json.loads(self._wait(f"{topic}/verdict"))
            if "missing" in verdict:
                raise SyncTimeout(_missing_text(verdict["missing"], self.timeout))
            groups = verdict["groups"]
        if len(groups) == 1:
            return {record: (groups[record], text)}
        if rank == groups[record][0]:
            self.store.set(f"{topic}/text/{record}", text)
        return {r: (ranks, self._wait(f"{topic}/text/{r}").decode()) for r, ranks in groups.items()}

    def forget(self, *topics: str) -> None:
        """Remove what `agree` left in the store. For main, once the others have gone on."""
        for topic in topics:
            _delete(self.store, f"{topic}/verdict", *(f"{topic}/{rank}" for rank in range(self.topology.world_size)))

    def _wait(self, key: str) -> bytes:
        return _wait(self.store, key, self.topology, self.timeout)


def meet(topology: Topology, timeout: float) -> Meeting:
    """Wait until every rank of the group is here.

    Each rank leaves a token, main answers each token with the name of a place and waits until the rank has been there.
    A token that a dead or failed attempt left behind is answered too, and overwritten by the rank's next one.

    Args:
        topology: The group, of at least two ranks.
        timeout: Seconds to wait for the others.

    Raises:
        SyncTimeout: Ranks are missing; names them.
        PeerError: The store no longer answers.
    """
    default_store: Any = dist.distributed_c10d._get_default_store()
    members = "-".join(map(str, topology.global_ranks))
    if topology.world_size == dist.get_world_size():
        members = "world"
    base = dist.PrefixStore(f"syncstate/{members}/{topology.main}", default_store.clone())
    if topology.is_main:
        place, missing = _gather(base, topology, timeout)
    else:
        token = uuid.uuid4().hex
        base.set(f"want/{topology.rank}", token)
        try:
            place = _wait(base, f"go/{token}", topology, timeout).decode()
        finally:
            _delete(base, f"want/{topology.rank}", f"go/{token}")
        base.set(f"{place}/here/{topology.rank}", token)
        missing = json.loads(_wait(base, f"{place}/missing", topology, timeout))
    if missing:
        raise SyncTimeout(_missing_text(missing, timeout))
    return Meeting(topology, dist.PrefixStore(place, base), timeout)


def _gather(store: Any, topology: Topology, timeout: float) -> tuple[str, list[int]]:
    """Main's side: answer tokens until every rank has come to the place; returns it, and who did not come."""
    place = uuid.uuid4().hex
    answered: dict[int, str] = {}
    absent = set(range(topology.world_size)) - {topology.rank}
    end = time.monotonic() + timeout
    while absent and time.monotonic() < end:
        for rank in sorted(absent):
            if store.check([f"{place}/here/{rank}"]):
                absent.discard(rank)
            else:
                # Not check and get: the rank may take its token back in between, and then a get waits for ever.
                token = store.compare_set(f"want/{rank}", _NO_TOKEN, _NO_TOKEN).decode()
                if token not in (_NO_TOKEN, answered.get(rank)):
                    store.set(f"go/{token}", place)
                    answered[rank] = token
        if absent:
            time.sleep(_POLL_SECONDS)
    store.set(f"{place}/missing", json.dumps(sorted(absent)))
    _delete(store, *(f"{place}/here/{rank}" for rank in range(topology.world_size)))
    return place, sorted(absent)


def _missing_text(missing: list[int], timeout: float) -> str:
    ranks = ", ".join(map(str, missing))
    return (
        f"start: {'ranks' if len(missing) > 1 else 'rank'} {ranks} did not arrive within {timeout:g} s; every rank of "
        "the group must start the engine"
    )


def _await_all(store: Any, keys: list[str], timeout: float) -> list[int]:
    """Wait for all keys; returns the indices of those that did not appear."""
    end = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() >= end:
            return [index for index, key in enumerate(keys) if not store.check([key])]
        time.sleep(_POLL_SECONDS)
    return []


def _wait(store: Any, key: str, topology: Topology, timeout: float) -> bytes:
    """The content of a key that main writes; polled, so that signals get through."""
    # Main gives up after the same time and says who is missing; wait a little longer, to hear it.
    end = time.monotonic() + timeout + 2.0
    pause = _POLL_SECONDS
    try:
        while not store.check([key]):
            if time.monotonic() >= end:
                raise SyncTimeout(
                    f"start: rank {topology.rank} waited {timeout:g} s for the main process (rank {topology.main}), "
                    "which did not arrive; every rank of the group must start the engine"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return bytes(store.get(key))
    except SyncTimeout:
        raise
    except RuntimeError as error:
        raise PeerError(
            f"start: the key-value store of the process group no longer answers on rank {topology.rank}; the process "
            f"that hosts it may have died: {error}"
        ) from error


def _delete(store: Any, *keys: str) -> None:
    for key in keys:
        try:
            store.delete_key(key)
        except RuntimeError:  # a store that is gone needs no housekeeping
            return

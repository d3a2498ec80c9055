"""How the ranks of a group find each other in the store before they share anything.

No collective runs before every rank has arrived. Ranks that are missing are named, and an attempt that failed leaves
nothing behind that a second one could stumble over.
"""

import json
import time
import uuid
from collections import Counter
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from syncstate.errors import ConfigError, PeerError, SyncStateError, SyncTimeout
from syncstate.topology import Topology, find_topology
from syncstate.wire.meeting import HOST, Meeting, Patience, store_lost
from syncstate.wire.notes import describe_error, fit
from syncstate.wire.store import Store, StoreLost

__all__ = ["decline", "meet"]

_POLL_SECONDS = 0.005
_DECLINE_SECONDS = 5.0
_NO_TOKEN = "-"  # no rank's token; what the store answers where there is none
_NOBODY = "null"  # nobody has declined
_attempts: Counter[tuple[int, ...]] = Counter()  # how often this process was to meet the ranks of a group


def decline(group: Any, error: BaseException) -> None:
    """Tell the ranks that wait, or will wait, that this one failed and does not come.

    Args:
        group: The group, as users give it; where there is none, nobody waits.
        error: Why.
    """
    try:
        topology = find_topology(group)
    except ConfigError:
        return
    if topology.world_size > 1:
        _attempts[topology.global_ranks] += 1
        with suppress(StoreLost):  # nobody can be told where the store is gone
            base = _base(topology, _DECLINE_SECONDS)
            try:
                _decline(base, topology, describe_error(error))
            finally:
                base.leave()


def _decline(store: Store, topology: Topology, text: str) -> None:
    told = {"attempt": _attempts[topology.global_ranks], "rank": topology.rank, "text": fit(text)}
    store.set("declined", json.dumps(told))


def _base(topology: Topology, timeout: float) -> Store:
    default_store: Any = dist.distributed_c10d._get_default_store()
    members = "-".join(map(str, topology.global_ranks))
    if topology.world_size == dist.get_world_size():
        members = "world"
    return Store.open(lambda: dist.PrefixStore(f"syncstate/{members}", default_store.clone()), timeout)


def _check_declined(store: Store, topology: Topology) -> None:
    """Raise if a rank has declined this attempt or a later one; what it said in an earlier one no longer counts."""
    declined = json.loads(_declined(store))
    if declined and declined["attempt"] >= _attempts[topology.global_ranks] and declined["rank"] != topology.rank:
        raise PeerError(f"start: rank {declined['rank']} failed before it had started: {declined['text']}")


def _come_back(store: Store, topology: Topology) -> None:
    """Take back what this rank has declined before: it comes now."""
    told = _declined(store)
    if told != _NOBODY and json.loads(told)["rank"] == topology.rank:
        store.compare_set("declined", told, _NOBODY)


def _declined(store: Store) -> str:
    """The last decline, as JSON."""
    return store.compare_set("declined", _NOBODY, _NOBODY).decode()


def meet(topology: Topology, timeout: float) -> Meeting:
    """Wait until every rank of the group is here.

    Each rank leaves a token; the first rank answers each token with the name of a place, and waits until the rank has
    been there. A token that a dead or failed attempt left behind is answered too, and overwritten by the rank's next.

    Args:
        topology: The group, of at least two ranks.
        timeout: Seconds to wait for the others.

    Raises:
        SyncTimeout: Ranks are missing; names them.
        PeerError: The store no longer answers.
    """
    _attempts[topology.global_ranks] += 1
    try:
        base = _base(topology, timeout)
    except StoreLost as error:
        raise store_lost("start", topology.rank, error) from error
    try:
        _come_back(base, topology)
        place, missing = _gather(base, topology, timeout) if topology.rank == HOST else _join(base, topology, timeout)
        if missing:
            ranks = ("ranks " if len(missing) > 1 else "rank ") + ", ".join(map(str, missing))
            raise SyncTimeout(
                f"start: {ranks} did not arrive within {timeout:g} s; every rank of the group must start the engine"
            )
        store = base.under(lambda raw: dist.PrefixStore(place, raw))
        return Meeting(topology, store, timeout, store.clone())
    except StoreLost as error:
        base.leave()
        raise store_lost("start", topology.rank, error) from error
    except BaseException as error:
        if not isinstance(error, SyncStateError):  # such as Ctrl-C; the others wait for this rank
            with suppress(StoreLost):
                _decline(base, topology, describe_error(error))
        base.leave()
        raise


def _join(store: Store, topology: Topology, timeout: float) -> tuple[str, list[int]]:
    """Ask the first rank for the place; returns it, and who did not come."""
    token = uuid.uuid4().hex
    store.set(f"want/{topology.rank}", token)
    try:
        place = _wait(store, f"go/{token}", topology, timeout).decode()
    finally:
        store.delete_key(f"want/{topology.rank}")
        store.delete_key(f"go/{token}")
    store.set(f"{place}/here/{topology.rank}", str(_attempts[topology.global_ranks]))
    missing, attempt = json.loads(_wait(store, f"{place}/missing", topology, timeout))
    _attempts[topology.global_ranks] = attempt
    return place, missing


def _gather(store: Store, topology: Topology, timeout: float) -> tuple[str, list[int]]:
    """The first rank's side: answer tokens until every rank has come to the place."""
    place = uuid.uuid4().hex
    answered: dict[int, str] = {}
    absent = set(range(topology.world_size)) - {topology.rank}
    end = time.monotonic() + timeout
    while absent and time.monotonic() < end:
        for rank in sorted(absent):
            if store.check([f"{place}/here/{rank}"]):
                absent.discard(rank)
                # Those that had failed alone have counted further; from here on all count alike.
                attempt = int(store.get(f"{place}/here/{rank}"))
                _attempts[topology.global_ranks] = max(_attempts[topology.global_ranks], attempt)
            else:
                # Not check and get: the rank may take its token back in between, and then a get waits for ever.
                token = store.compare_set(f"want/{rank}", _NO_TOKEN, _NO_TOKEN).decode()
                if token not in (_NO_TOKEN, answered.get(rank)):
                    store.set(f"go/{token}", place)
                    answered[rank] = token
        if absent:
            _check_declined(store, topology)
            time.sleep(_POLL_SECONDS)
    store.set(f"{place}/missing", json.dumps([sorted(absent), _attempts[topology.global_ranks]]))
    return place, sorted(absent)


def _wait(store: Store, key: str, topology: Topology, timeout: float) -> bytes:
    """The content of a key that the first rank writes; polled, so that signals get through."""
    # The first rank gives up after the same time and says who is missing; wait a little longer, to hear it.
    patience = Patience(timeout + 2.0)
    while not store.check([key]):
        _check_declined(store, topology)
        if not patience.pause():
            raise SyncTimeout(
                f"start: rank {topology.rank} waited {timeout + 2.0:g} s for rank {HOST} of the group, which did not "
                "arrive; every rank of the group must start the engine"
            )
    return store.get(key)

"""What an optimizer holds beside the parameters: tensors of its state, and the plain numbers of its groups."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncstate.digest import digest_text
from syncstate.errors import ConfigError, MismatchError
from syncstate.resync.items import Item, Slot, parse_about, tensor_item, value_item
from syncstate.resync.sharding import local_shard
from syncstate.resync.tensors import Selection

__all__ = ["Layout", "align", "check_optimizers", "make", "optimizer_items"]

Layout = dict[str, str]  # name -> what must be the same on all ranks

_KEPT_ELSEWHERE = ("params", "param_names")


def check_optimizers(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that a user gave: none, one or a sequence.

    Raises:
        ConfigError: Something else, or one whose state is sharded.
    """
    if optimizer is None:
        return ()
    given = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for one in given:
        if not hasattr(one, "param_groups") or not hasattr(one, "state"):
            raise ConfigError(f"resync: optimizer must be a torch.optim.Optimizer or a list of them, got {one!r}")
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(one).__mro__):
            raise ConfigError(
                "resync: a ZeroRedundancyOptimizer shards its state over the ranks, so there is nothing to compare; "
                "leave out optimizer="
            )
    return given


def optimizer_items(optimizers: Sequence[Any], selection: Selection) -> tuple[list[Item], dict[str, Slot]]:
    """The items of optimizers, and for each entry of their states the place where more of it can be put.

    Nothing is created by looking: the state of an optimizer that has not stepped yet stays empty.

    Args:
        optimizers: Checked.
        selection: Names the parameters, and says what is left out.

    Raises:
        ConfigError: A value that cannot be compared.
    """
    items: list[Item] = []
    places: dict[str, Slot] = {}
    for number, optimizer in enumerate(optimizers):
        prefix = "optimizer" if len(optimizers) == 1 else f"optimizer.{number}"
        for index, group in enumerate(optimizer.param_groups):
            name = f"{prefix}.param_groups.{index}"
            places[name] = Slot({name: group}, name, "")
            items += _group_items(name, group, places[name], selection)
            for position, parameter in enumerate(group["params"]):
                if id(parameter) in selection.excluded:
                    continue
                known = selection.names.get(id(parameter), f"{index}.{position}")
                name = f"{prefix}.state.{known}"
                places[name] = Slot(optimizer.state, parameter, "", parameter.device)
                state = optimizer.state.get(parameter, {})
                items += _entry_items(name, state, places[name], selection)
    return items, places


def _group_items(name: str, group: Mapping[str, Any], place: Slot, selection: Selection) -> Iterator[Item]:
    members = [selection.names.get(id(parameter), str(position)) for position, parameter in enumerate(group["params"])]
    yield Item(f"{name}.params", f"{len(members)} parameters ({digest_text(json.dumps(members)).hex()[:8]})")
    entries = {key: value for key, value in group.items() if key not in _KEPT_ELSEWHERE}
    yield from _entry_items(name, entries, place, selection)


def _entry_items(name: str, entries: Mapping[Any, Any], place: Slot, selection: Selection) -> Iterator[Item]:
    for key, value in entries.items():
        full = f"{name}.{key}"
        if selection.leaves_out(full):
            continue
        slot = Slot(place.states, place.owner, key, place.device)
        if isinstance(value, Tensor):
            local, cohort = local_shard(full, value, selection.members)
            item = tensor_item(full, local)
            item.cohort, item.slot = cohort, slot
            yield item
        else:
            yield value_item(full, value, slot)


def missing(name: str, about: str, places: Mapping[str, Slot], members: Sequence[int]) -> Item:
    """An item for what another rank's optimizer holds and this one's does not.

    Raises:
        MismatchError: It belongs to no parameter of this rank.
    """
    entry, _, key = name.rpartition(".")
    place = places.get(entry)
    if place is None:
        raise MismatchError(f"resync: another rank's optimizer holds {name} ({about}), for which this one has no place")
    item = Item(name, about, slot=Slot(place.states, place.owner, key, place.device), absent=True)
    if not item.is_value and isinstance(place.owner, Tensor):
        local, cohort = local_shard(name, place.owner, members)
        if list(local.shape) == parse_about(about)[1]:
            item.cohort = cohort
    return item


def make(item: Item) -> None:
    """Add the tensor that this rank lacks, of zeros, to its optimizer. No step is made for it."""
    slot = item.slot
    if slot is None:
        return
    dtype, shape, kind = parse_about(item.about)
    owner = slot.owner
    full = torch.zeros(shape, dtype=dtype, device="cpu" if kind == "cpu" else slot.device)
    if isinstance(owner, Tensor) and owner.is_cpu == full.is_cpu:
        local, _ = local_shard(item.name, owner)
        if list(local.shape) == shape:  # in the parameter's layout in memory, and sharded as it is
            full = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
    slot.put(full)
    held = tensor_item(item.name, local_shard(item.name, full)[0])
    item.tensor, item.size, item.end, item.absent = held.tensor, held.size, held.end, False


def align(
    items: Sequence[Item], layouts: Sequence[Layout], places: Mapping[str, Slot], members: Sequence[int]
) -> list[Item]:
    """The items of an optimizer, with one for everything that any rank's optimizer holds.

    Args:
        items: This rank's.
        layouts: Name -> description, one of each kind that the ranks have.
        places: As `optimizer_items` returns them.
        members: Global ranks of the group.

    Raises:
        MismatchError: Two ranks hold something of another type or shape under one name.
    """
    union: Layout = {}
    for layout in layouts:
        for name, about in layout.items():
            if union.setdefault(name, about) != about:
                raise MismatchError(
                    f"resync: the optimizers of the ranks differ: {name} is {union[name]} on one rank and {about} on "
                    "another"
                )
    held = {item.name for item in items}
    more = [missing(name, about, places, members) for name, about in union.items() if name not in held]
    return sorted([*items, *more], key=lambda item: item.name)

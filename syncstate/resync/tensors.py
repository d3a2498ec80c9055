"""Which tensors of a module a resync looks at, and under which names."""

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from syncstate.errors import ConfigError
from syncstate.resync.items import Item, tensor_item
from syncstate.resync.sharding import local_shard, refuse_sharded
from syncstate.resync.walk import Found, is_plain, signs, unwrap, walk

__all__ = ["INCLUDE", "Selection", "Survey", "check_exclude", "check_include"]

INCLUDE = ("parameters", "buffers")


def check_include(include: Any) -> tuple[str, ...]:
    """Check the kinds of tensors that a user chose."""
    given = (include,) if isinstance(include, str) else include
    if not isinstance(given, Sequence) or not given or any(kind not in INCLUDE for kind in given):
        raise ConfigError(f"resync: include must name some of {', '.join(map(repr, INCLUDE))}, got {include!r}")
    return tuple(dict.fromkeys(given))


def check_exclude(exclude: Any) -> tuple[str | type[nn.Module], ...]:
    """Check what a user left out: patterns of names, and classes of modules."""
    given = (exclude,) if isinstance(exclude, (str, type)) else exclude
    if not isinstance(given, Sequence):
        raise ConfigError(f"resync: exclude must be a list of name patterns and module classes, got {exclude!r}")
    for entry in given:
        if not (isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))):
            raise ConfigError(
                "resync: exclude takes name patterns such as 'head.*' and module classes such as "
                f"torch.nn.BatchNorm2d, got {entry!r}"
            )
    return tuple(given)


class Selection:
    """What of a module, or of a mapping of tensors, is looked at.

    Args:
        found: All its tensors.
        classes: Those of the excluded classes that it has.
        include, exclude: Checked.
        members: Global ranks of the group.

    Raises:
        ConfigError: A tensor that cannot be compared.

    Attributes:
        items: One for each tensor, sorted by name; tied tensors once, under the first of their names.
        names: The names of all tensors, also of those that were left out, by `id`.
        excluded: The `id` of those that were left out.
        sharded: Name -> description of the tensors of which not every rank holds the same part.
        members: As given.
    """

    def __init__(
        self,
        found: Sequence[Found],
        classes: set[type[nn.Module]],
        include: Sequence[str],
        exclude: Sequence[str | type[nn.Module]],
        members: Sequence[int],
    ) -> None:
        self.members = members
        self.names: dict[int, str] = {}
        self.excluded: set[int] = set()
        self.sharded: dict[str, str] = {}
        self._unmatched = set(exclude) - classes
        self._patterns = [entry for entry in exclude if isinstance(entry, str)]
        chosen: dict[Any, Found] = {}
        left_out: set[Any] = set()
        for one in found:
            self.names.setdefault(id(one.tensor), one.name)
            place = _place(one.tensor)
            if one.kind in include:
                chosen.setdefault(place, one)
            if self.leaves_out(one.name) or one.inside:
                left_out.add(place)
                self.excluded.add(id(one.tensor))
        self.items = [self._item(one) for place, one in chosen.items() if place not in left_out]
        self.items.sort(key=lambda item: item.name)

    def leaves_out(self, name: str) -> bool:
        """Whether a pattern matches a name."""
        hits = [pattern for pattern in self._patterns if fnmatch.fnmatchcase(name, pattern)]
        self._unmatched.difference_update(hits)
        return bool(hits)

    def check_matched(self) -> None:
        """Raise for an exclusion that matched nothing, which is a typing error more often than not."""
        for entry in sorted(self._unmatched, key=str):
            what = repr(entry) if isinstance(entry, str) else entry.__qualname__
            known = list(self.names.values())
            raise ConfigError(
                f"resync: exclude: {what} matches no parameter, buffer or module; the names are "
                f"{', '.join(known[:8]) or 'none'}{', ...' if len(known) > 8 else ''}"
            )

    def _item(self, one: Found) -> Item:
        local, cohort = local_shard(one.name, one.tensor, self.members)
        item = tensor_item(one.name, local)
        item.cohort = cohort
        if cohort:
            dtype = str(one.tensor.dtype).removeprefix("torch.")
            placements = getattr(one.tensor, "placements", ())
            self.sharded[one.name] = f"sharded {dtype} {list(one.tensor.shape)} {placements}"
        return item


class Survey:
    """Looks at a module again and again; where no tensor was replaced or moved, what was seen last still holds.

    Args:
        include, exclude: Checked.
        members: Global ranks of the group.
    """

    def __init__(
        self, include: Sequence[str], exclude: Sequence[str | type[nn.Module]], members: Sequence[int]
    ) -> None:
        self._include = include
        self._exclude = exclude
        self._classes = [entry for entry in exclude if isinstance(entry, type)]
        self._members = members
        self._signs: list[Any] | None = None
        self._selection: Selection | None = None

    def look(self, module: Any) -> Selection:
        """The selection of a module as it is now.

        Raises:
            ConfigError: There is a tensor that cannot be compared.
        """
        found, classes = walk(module, self._classes)
        seen = signs(found)
        if seen is None or seen != self._signs or self._selection is None:
            if isinstance(module, nn.Module):
                refuse_sharded(unwrap(module))
            self._selection = Selection(found, classes, self._include, self._exclude, self._members)
            self._signs = seen
        return self._selection


def _place(tensor: Tensor) -> Any:
    """What two tied tensors have in common: the object, or the very same place in memory."""
    if not is_plain(tensor):
        return id(tensor)
    pointer = tensor.data_ptr() if tensor.numel() else 0
    return (pointer, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device) if pointer else id(tensor)

"""What is compared and repaired: one item for each tensor or value, with a name that is the same on all ranks."""

import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncstate.digest import in_storage
from syncstate.errors import ConfigError
from syncstate.resync.bits import spread, whole
from syncstate.wire import decode, encode

__all__ = ["WORLD", "Item", "Slot", "describe", "parse_about", "tensor_item", "value_item", "writable"]

WORLD: tuple[int, ...] = ()  # the cohort of what every rank of the group holds


@dataclass(slots=True)
class Slot:
    """Where an optimizer keeps something, so that it can be added, replaced or taken away.

    Attributes:
        states: The optimizer's `state`, whose entries may be missing; or a mapping with a single one.
        owner: The parameter, or whatever the entry's key is.
        key: The key in the entry.
        device: Where the parameter lies.
    """

    states: MutableMapping[Any, Any]
    owner: Any
    key: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def put(self, value: Any) -> None:
        """Hold a value."""
        self.states.setdefault(self.owner, {})[self.key] = value

    def drop(self) -> None:
        """Hold nothing."""
        entry = self.states.get(self.owner, {})
        entry.pop(self.key, None)


@dataclass(slots=True)
class Item:
    """One tensor or value.

    Attributes:
        name: What reports and errors call it.
        about: What must be the same on all ranks: kind, type and shape.
        tensor: The local tensor; None for a value, and for what is missing or has no memory.
        data: The value as bytes; None for a tensor, and for what is missing.
        slot: Where an optimizer keeps it; None for a tensor of the module.
        cohort: Global ranks that hold the same shard; empty for what every rank holds.
        absent: Whether this rank lacks what another has.
        size: Bytes of the tensor; 0 for what has none.
        end: Where in its storage the tensor ends, in bytes, if it lies there in one piece on the CPU; else 0.
        memory: Where it lay when its bits were last read, and a view of that place.
    """

    name: str
    about: str
    tensor: Tensor | None = None
    data: bytes | None = None
    slot: Slot | None = None
    cohort: tuple[int, ...] = WORLD
    absent: bool = False
    size: int = 0
    end: int = 0
    memory: tuple[int, memoryview] = (0, memoryview(b""))

    @property
    def is_value(self) -> bool:
        """Whether it is a plain value and no tensor."""
        return self.about == "value"

    @property
    def is_structure(self) -> bool:
        """Whether it has no content and only its description counts."""
        return self.tensor is None and self.data is None and not self.absent and "[" not in self.about

    @property
    def travels(self) -> bool:
        """Whether there is anything to bring; the same on all ranks."""
        return self.is_value or self.size > 0 or (self.absent and 0 not in parse_about(self.about)[1])

    def bits(self) -> Tensor:
        """The tensor's bits as whole numbers; a view."""
        if self.tensor is None:
            raise ConfigError(f"{self.name!r} is no tensor")
        return whole(self.tensor)

    def set_value(self, data: bytes | None) -> None:
        """Hold another value, from bytes; None takes it away."""
        if self.slot is None:
            return
        if data is None:
            self.slot.drop()
        else:
            self.slot.put(decode(data))


def tensor_item(name: str, tensor: Tensor) -> Item:
    """An item for a tensor that every rank of the group holds.

    Raises:
        ConfigError: A tensor without bits that could be compared, such as a sparse one.
    """
    if tensor.is_meta or _is_lazy(tensor):
        return Item(name, describe(tensor))
    local = tensor.detach()
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        raise ConfigError(
            f"resync: {name!r} is a tensor of layout {local.layout}{', quantized' if local.is_quantized else ''}"
            f"{', nested' if local.is_nested else ''}, whose bits cannot be compared; leave it out with exclude"
        )
    if local.is_conj() or local.is_neg():
        raise ConfigError(
            f"resync: {name!r} is a lazily conjugated view, which cannot be written to in place; store "
            "tensor.resolve_conj().resolve_neg() instead, or leave it out with exclude"
        )
    if not in_storage(local) or (local.numel() and not local.data_ptr()):
        raise ConfigError(
            f"resync: {name!r} is a tensor whose memory was freed, or that never had any; resync while it is there, or "
            "leave it out with exclude"
        )
    size = local.numel() * local.element_size()
    dense = local.is_cpu and local.is_contiguous()
    end = int(local.storage_offset()) * local.element_size() + size if dense else 0
    return Item(name, describe(tensor), tensor=local, size=size, end=end)


def value_item(name: str, value: Any, slot: Slot) -> Item:
    """An item for a plain value.

    Raises:
        ConfigError: A value that cannot travel.
    """
    try:
        return Item(name, "value", data=encode(value), slot=slot)
    except TypeError as error:
        raise ConfigError(f"resync: {name!r} cannot be compared: {error}; leave it out with exclude") from error


def describe(tensor: Tensor) -> str:
    """Type, shape and, where it has no memory, why: what must be the same on all ranks."""
    if _is_lazy(tensor):
        return "uninitialized"
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = "meta" if tensor.is_meta else "cpu" if tensor.is_cpu else "accelerator"
    return f"{dtype} {list(tensor.shape)} {kind}"


def parse_about(about: str) -> tuple[torch.dtype, list[int], str]:
    """Type, shape and place of a tensor from what `describe` says of it."""
    dtype, rest = about.split(" ", 1)
    shape, kind = rest.rsplit(" ", 1)
    return getattr(torch, dtype), json.loads(shape), kind


def _is_lazy(tensor: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(tensor)


def writable(tensor: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor and what to copy into it; where elements share a place in memory, one of each such set.

    Args:
        tensor: The target, perhaps expanded.
        other: Of the same shape.
    """
    if spread(tensor):
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor, other = tensor.narrow(dim, 0, 1), other.narrow(dim, 0, 1)
    return tensor, other

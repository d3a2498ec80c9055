"""The tensors of a module or a mapping, with their names, in an order that all ranks share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from syncstate.errors import ConfigError

__all__ = ["Found", "is_plain", "signs", "unwrap", "walk"]

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Found(NamedTuple):
    """One tensor under one of its names.

    Attributes:
        name: Its path, without the names of wrappers.
        tensor: The tensor.
        kind: `"parameters"` or `"buffers"`.
        inside: Classes that were asked for, of the modules that it stands in.
    """

    name: str
    tensor: Tensor
    kind: str
    inside: frozenset[type[nn.Module]]


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside what DDP and torch.compile put around it."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def walk(module: Any, classes: Sequence[type[nn.Module]] = ()) -> tuple[list[Found], set[type[nn.Module]]]:
    """All tensors, tied ones under each of their names.

    Args:
        module: A module, wrapped or not, or a mapping of tensors, which count as parameters.
        classes: Which classes of modules to look for.

    Returns:
        What was found, and those of the classes that have a module.

    Raises:
        ConfigError: Something else.
    """
    if isinstance(module, Mapping):
        return [_entry(name, module[name]) for name in sorted(module)], set()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"resync: module must be a torch.nn.Module or a mapping of tensors, got {module!r}")
    found: list[Found] = []
    nothing: frozenset[type[nn.Module]] = frozenset()
    above: dict[str, frozenset[type[nn.Module]]] = {}
    for path, child in unwrap(module).named_modules(remove_duplicate=False):
        inside = nothing
        if classes:
            inside = above.get(path.rpartition(".")[0], nothing) | {kind for kind in classes if isinstance(child, kind)}
            above[path] = inside
        prefix = f"{path}." if path else ""
        if "_" in prefix:
            prefix = _WRAPPERS.sub("", prefix)
        for kind, held in (("parameters", child._parameters), ("buffers", child._buffers)):
            for key, tensor in held.items():
                if tensor is not None:
                    found.append(Found(prefix + key, tensor, kind, inside))
    return found, set().union(*above.values())


def _entry(name: Any, tensor: Any) -> Found:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ConfigError(f"resync: a mapping must hold tensors under names, got {tensor!r} under {name!r}")
    return Found(name, tensor, "parameters", frozenset())


def is_plain(tensor: Tensor) -> bool:
    """Whether it is of no class of its own and lies somewhere, so that its place in memory tells it from others."""
    if type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_nested:
        return False
    return tensor.layout is torch.strided


def signs(found: Sequence[Found]) -> list[Any] | None:
    """What changes when a tensor is replaced, moved, resized or freed; None where that cannot be told."""
    seen: list[Any] = []
    for one in found:
        tensor = one.tensor
        if not is_plain(tensor):
            return None
        memory = tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.is_conj(), tensor.is_neg()
        seen.append((one.name, one.kind, id(tensor), memory, tensor.shape, tensor.stride(), tensor.dtype))
    return seen

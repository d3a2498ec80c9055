"""Why a value cannot travel: where inside it, of which type, and what to send instead."""

import dataclasses
import enum
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from syncstate.errors import CodecError

__all__ = ["explain"]

_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, pathlib.Path, "
    "NumPy arrays and scalars, tensors"
)


def explain(value: Any, error: Exception, probe: Callable[[Any], None], max_depth: int) -> CodecError:
    """Returns the error to raise for `value`, whose encoding failed with `error`.

    It looks for the first part of the value that `probe` refuses. That takes a second walk, which only a failure pays.
    """
    try:
        for path, part in _parts(value, "", 0, max_depth):
            try:
                probe(part)
            except CodecError as refusal:
                reason = str(refusal) or _why_not(part)
                return CodecError(f"cannot encode {path or 'the value'} of type {_name(part)}: {reason}")
    except CodecError as too_deep:
        return too_deep
    except Exception as second:  # the value changed, or does not let itself be looked at
        error = second
    return CodecError(f"cannot encode a value of type {_name(value)}: {type(error).__name__}: {error}")


def _parts(value: Any, path: str, depth: int, max_depth: int) -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of everything below `value` that is no container."""
    kind = type(value)
    if kind not in (list, tuple, dict, set, frozenset):
        yield path, value
        return
    if depth >= max_depth:
        raise CodecError(
            f"cannot encode {path[:80]}...: it is nested deeper than {max_depth} levels, or contains itself"
        )
    if kind is dict:
        for key in value:
            yield from _parts(key, f"{path}<key {_short(key)}>", depth + 1, max_depth)
            yield from _parts(value[key], _below(path, key), depth + 1, max_depth)
    elif kind in (set, frozenset):
        for item in value:
            yield from _parts(item, f"{path}{{{_short(item)}}}", depth + 1, max_depth)
    else:
        for index, item in enumerate(value):
            yield from _parts(item, f"{path}[{index}]", depth + 1, max_depth)


def _below(path: str, key: Any) -> str:
    if type(key) is not str or not key.isidentifier():
        return f"{path}[{_short(key)}]"
    return f"{path}.{key}" if path else key


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a user's own __repr__ must not hide what is wrong
        text = f"a {_name(value)}"
    return text if len(text) <= 40 else text[:37] + "..."


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# The first row whose types fit tells what to send instead; subclasses stand above what they are made from.
_INSTEAD: list[tuple[tuple[type, ...], str]] = [
    ((enum.Enum,), "x.value"),
    ((np.ma.MaskedArray,), "x.filled()"),
    ((np.ndarray,), "np.asarray(x)"),
    ((torch.nn.Module,), "dict(x.state_dict())"),
    ((torch.dtype, torch.device), "str(x)"),
    ((bytearray, memoryview, bytes), "bytes(x)"),
    ((tuple,), "tuple(x)"),
    ((dict,), "dict(x)"),
    ((list, range, Iterator, type({}.keys()), type({}.values()), type({}.items())), "list(x)"),
    ((set,), "set(x)"),
    ((frozenset,), "frozenset(x)"),
    ((bool, np.bool_), "bool(x)"),
    ((int,), "int(x)"),
    ((float,), "float(x)"),
    ((complex,), "complex(x)"),
    ((str, pathlib.PurePath), "str(x)"),
]


def _why_not(value: Any) -> str:
    instead = next((text for kinds, text in _INSTEAD if isinstance(value, kinds)), "")
    if isinstance(value, torch.Tensor):
        instead = "x.to_local() or x.full_tensor()" if hasattr(value, "to_local") else "x.as_subclass(torch.Tensor)"
    elif not instead and dataclasses.is_dataclass(value) and not isinstance(value, type):
        instead = "dataclasses.asdict(x)"
    elif not instead and hasattr(value, "isoformat"):
        instead = "x.isoformat()"
    elif not instead and hasattr(value, "__array__"):
        instead = "np.asarray(x)"
    hint = f"send {instead}; " if instead else ""
    return f"{hint}allowed, as exact types: {_ALLOWED}; other types only with allow_pickle=True on all ranks"

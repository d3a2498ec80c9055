"""What is promised of a value: a type, or the shape and dtype of a tensor. Main checks it before anything is sent."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from syncstate.errors import ConfigError

__all__ = ["TensorSpec", "check_spec", "describe", "parse_spec"]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of this shape and dtype.

    Args:
        shape: Sizes of all dimensions; `()` is a scalar tensor.
        dtype: A `torch.dtype`.

    Raises:
        ConfigError: A size that is not a whole number of at least 0, or no dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        given: Any = self.shape
        sizes = tuple(given) if isinstance(given, Iterable) else (given,)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
            raise ConfigError(f"TensorSpec: shape must be whole numbers of at least 0, got {self.shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"TensorSpec: dtype must be a torch.dtype such as torch.float32, got {self.dtype!r}")
        object.__setattr__(self, "shape", sizes)

    def __str__(self) -> str:
        return f"tensor {list(self.shape)} {self.dtype}"


def parse_spec(owner: str, spec: Any) -> TensorSpec | type | None:
    """Check what a user gave as `spec`; `owner` is named in the error."""
    if spec is None or isinstance(spec, (TensorSpec, type)):
        return spec
    raise ConfigError(f"{owner}: spec must be a TensorSpec or a type such as float, got {spec!r}")


def describe(value: Any) -> str:
    """The type of a value, with shape and dtype where it has them; never its content."""
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} {value.dtype}"
    return type(value).__name__


def check_spec(value: Any, spec: TensorSpec | type | None) -> str | None:
    """What is wrong with the value, as half a sentence; None when the promise holds."""
    if spec is None:
        return None
    if isinstance(spec, TensorSpec):
        good = isinstance(value, torch.Tensor) and tuple(value.shape) == spec.shape and value.dtype == spec.dtype
    else:
        # isinstance alone would let True pass for an int and a subclass for what it is not on the other ranks.
        good = type(value) is spec or (isinstance(value, spec) and not isinstance(value, bool))
    return (
        None if good else f"promised {spec if isinstance(spec, TensorSpec) else spec.__name__}, got {describe(value)}"
    )

"""What a user promises of a value is checked bit by bit: type, shape and dtype."""

import re
from typing import Any

import pytest
import torch

from syncstate.errors import ConfigError
from syncstate.spec import TensorSpec, check_spec, describe, parse_spec


class Celsius(float):
    pass


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (1.5, None),
        (object(), None),
        (1.5, float),
        (3, int),
        (True, bool),
        ("x", str),
        ([1, "a"], list),
        (None, type(None)),
        (torch.zeros(2, 3), torch.Tensor),
        (torch.zeros(2, 3), TensorSpec((2, 3), torch.float32)),
        (torch.tensor(1), TensorSpec((), torch.int64)),
        (torch.zeros(0, 4, dtype=torch.bfloat16), TensorSpec((0, 4), torch.bfloat16)),
    ],
)
def test_a_value_that_keeps_the_promise_passes(value: Any, spec: TensorSpec | type | None) -> None:
    assert check_spec(value, spec) is None


@pytest.mark.parametrize(
    ("value", "spec", "message"),
    [
        (1, float, "promised float, got int"),
        (1.0, int, "promised int, got float"),
        (True, int, "promised int, got bool"),
        (1, bool, "promised bool, got int"),
        (None, float, "promised float, got NoneType"),
        (torch.tensor(1.0), float, "promised float, got tensor [] torch.float32"),
        (1.0, TensorSpec((), torch.float32), "promised tensor [] torch.float32, got float"),
        (
            torch.zeros(3),
            TensorSpec((2,), torch.float32),
            "promised tensor [2] torch.float32, got tensor [3] torch.float32",
        ),
        (
            torch.zeros(2, dtype=torch.float64),
            TensorSpec((2,), torch.float32),
            "promised tensor [2] torch.float32, got tensor [2] torch.float64",
        ),
        (
            torch.zeros(1, 2),
            TensorSpec((2,), torch.float32),
            "promised tensor [2] torch.float32, got tensor [1, 2] torch.float32",
        ),
    ],
)
def test_a_broken_promise_is_told_with_both_sides(value: Any, spec: TensorSpec | type, message: str) -> None:
    assert check_spec(value, spec) == message


def test_a_message_never_shows_the_value() -> None:
    assert describe("secret") == "str"
    assert describe(torch.tensor([1.0, 2.0])) == "tensor [2] torch.float32"


def test_a_single_size_is_a_shape_of_one_dimension() -> None:
    assert TensorSpec(5, torch.int64) == TensorSpec((5,), torch.int64)  # type: ignore[arg-type]
    assert TensorSpec([2, 3], torch.int64).shape == (2, 3)  # type: ignore[arg-type]
    assert TensorSpec(torch.Size([2, 3]), torch.int64).shape == (2, 3)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, -1), torch.int64, "TensorSpec: shape must be whole numbers of at least 0, got (2, -1)"),
        ((2.0,), torch.int64, "TensorSpec: shape must be whole numbers of at least 0, got (2.0,)"),
        ((True,), torch.int64, "TensorSpec: shape must be whole numbers of at least 0, got (True,)"),
        ("ab", torch.int64, "TensorSpec: shape must be whole numbers of at least 0, got 'ab'"),
        (None, torch.int64, "TensorSpec: shape must be whole numbers of at least 0, got None"),
        (2.5, torch.int64, "TensorSpec: shape must be whole numbers of at least 0, got 2.5"),
        ((2,), float, "TensorSpec: dtype must be a torch.dtype such as torch.float32, got <class 'float'>"),
        ((2,), "float32", "TensorSpec: dtype must be a torch.dtype such as torch.float32, got 'float32'"),
    ],
)
def test_a_tensor_spec_refuses(shape: Any, dtype: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        TensorSpec(shape, dtype)


def test_a_spec_is_a_tensor_spec_or_a_type() -> None:
    spec = TensorSpec((2,), torch.float32)
    assert parse_spec("value 'x'", spec) is spec
    assert parse_spec("value 'x'", float) is float
    assert parse_spec("value 'x'", None) is None
    message = "value 'x': spec must be a TensorSpec or a type such as float, got 'float'"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        parse_spec("value 'x'", "float")


@pytest.mark.parametrize("spec", [list[int], int | None])
def test_types_that_isinstance_does_not_know_are_refused_at_once(spec: Any) -> None:
    with pytest.raises(ConfigError, match="spec must be a TensorSpec or a type"):
        parse_spec("value 'x'", spec)


def test_a_subclass_keeps_the_promise_of_its_class() -> None:
    assert check_spec(Celsius(3.0), float) is None

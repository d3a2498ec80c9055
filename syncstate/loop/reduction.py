"""What main makes of the results that the ranks sent: all of them, or one number for all ranks."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from syncstate.spec import describe

__all__ = ["reduce_results"]


def _smaller(a: Any, b: Any) -> Any:
    return _elementwise(torch.minimum, np.minimum, min, a, b)


def _larger(a: Any, b: Any) -> Any:
    return _elementwise(torch.maximum, np.maximum, max, a, b)


def _either(a: Any, b: Any) -> Any:
    return _elementwise(torch.logical_or, np.logical_or, operator.or_, a, b)


def _both(a: Any, b: Any) -> Any:
    return _elementwise(torch.logical_and, np.logical_and, operator.and_, a, b)


_PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": operator.add,
    "sum": operator.add,
    "min": _smaller,
    "max": _larger,
    "any": _either,
    "all": _both,
}


def reduce_results(how: str, results: Sequence[Any]) -> Any:
    """All results as a list, or reduced over the ranks, element by element, each rank counting once.

    Args:
        how: `"list"`, `"mean"`, `"sum"`, `"min"`, `"max"`, `"any"` or `"all"`.
        results: One for each rank: numbers, or tensors or arrays of one shape. None is no result.

    Returns:
        For `"list"` the results. Else the reduced result, None over nothing; NaN in one is NaN in the result, except
        for `"any"` and `"all"`, where it is true.

    Raises:
        TypeError, ValueError: What cannot be reduced; says what each rank sent.
    """
    if how == "list":
        return list(results)
    given = [result for result in results if result is not None]
    if not given:
        return None
    shapes = {tuple(getattr(result, "shape", ())) for result in given}
    if len(shapes) > 1 or not all(isinstance(one, (bool, int, float, complex, np.generic, np.ndarray, torch.Tensor))
                                  for one in given):  # fmt: skip
        sent = "; ".join(f"rank {rank}: {describe(result)}" for rank, result in enumerate(results))
        raise TypeError(
            f'reduce="{how}" takes a number, or a tensor or array of the same shape, from each rank, got {sent}; '
            'give reduce="list" to find them as they are'
        )
    if how in ("any", "all"):
        given = [_truth(result) for result in given]
    elif how in ("mean", "sum"):  # true and true are 2, also where a tensor of truth values would say true
        given = [_counted(result) for result in given]
    total = functools.reduce(_PAIRS[how], given)
    return total / len(given) if how == "mean" else total


def _truth(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.to(torch.bool)
    return result.astype(bool) if isinstance(result, np.ndarray) else bool(result)


def _counted(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.to(torch.int64) if result.dtype == torch.bool else result
    if isinstance(result, np.ndarray):
        return result.astype(np.int64) if result.dtype == bool else result
    return result.item() if isinstance(result, np.generic) else result


def _elementwise(
    on_tensors: Callable[..., Any], on_arrays: Callable[..., Any], on_numbers: Callable[..., Any], a: Any, b: Any
) -> Any:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return on_tensors(torch.as_tensor(a), torch.as_tensor(b))
    if isinstance(a, (np.ndarray, np.generic)) or isinstance(b, (np.ndarray, np.generic)):
        return on_arrays(a, b)
    if a != a or b != b:  # NaN, which python's min and max keep or lose by the order
        return a if a != a else b
    return on_numbers(a, b)

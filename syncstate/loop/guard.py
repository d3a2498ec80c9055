"""The global random generators, put back after a source ran: a draw on one rank alone would part it from the others."""

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["RandomGuard"]

_TWISTER_BYTES = 625 * 4  # the state of a Mersenne Twister: 624 words and a position, in python and in numpy


class RandomGuard:
    """A context that keeps the states of the global generators of python, numpy and torch (CPU).

    They are put back by `restore`, and at the end of the block if it was not called.

    Reading the states of python and numpy in full costs 30 us, a third of a small broadcast. Their memory is read for
    a fraction of that, and where it is what it was after the last full reading, that reading still holds.
    """

    def __init__(self) -> None:
        self._python = _Twister(_python_memory, random.getstate, random.setstate)
        self._numpy = _Twister(_NumpyMemory(), _numpy_state, np.random.set_state)
        self._torch = torch.default_generator.get_state()
        self._kept = False

    def __enter__(self) -> "RandomGuard":
        self._python.keep()
        self._numpy.keep()
        self._torch = torch.default_generator.get_state()
        self._kept = True
        return self

    def restore(self) -> None:
        """Put the states back."""
        if self._kept:
            self._kept = False
            self._python.restore()
            self._numpy.restore()
            torch.default_generator.set_state(self._torch)

    def __exit__(self, *_: object) -> None:
        self.restore()


class _Twister:
    """One generator, known by its memory.

    Args:
        memory: Its state as raw bytes; empty where the layout is unknown, so that every reading is a full one.
        get, put: Its state in full; a mapping with `has_gauss` keeps a number beside the memory.
    """

    def __init__(self, memory: Callable[[], bytes], get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._memory, self._get, self._put = memory, get, put
        self._seen, self._state = b"", None

    def keep(self) -> None:
        seen = self._memory()
        if seen and seen == self._seen:
            return
        self._state = self._get()
        # A cached second normal draw can go without a change of the memory, which then proves nothing.
        cached = isinstance(self._state, dict) and self._state["has_gauss"]
        self._seen = b"" if cached else seen

    def restore(self) -> None:
        if not self._seen or self._memory() != self._seen:
            self._put(self._state)


def _python_memory() -> bytes:
    """The state of python's global generator."""
    # The second of a pair of normal draws is kept beside the twister.
    if not _PYTHON_LAYOUT or _python.gauss_next is not None:
        return b""
    raw: bytes = _PYTHON_WORDS.raw
    return raw


def _python_layout() -> bool:
    """Whether the generator's words lie right behind the object's head, as in CPython; looked up, not assumed."""
    if _python is None or type(_python).__basicsize__ < object.__basicsize__ + _TWISTER_BYTES:
        return False
    words = _python.getstate()[1]
    found = np.frombuffer(_behind_head(_python, _TWISTER_BYTES).raw, dtype=np.uint32)
    return bool(tuple(found[1:]) == words[:-1] and int(found[0]) == words[-1])


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)


class _NumpyMemory:
    """Reads the state of numpy's global generator, as raw bytes."""

    def __init__(self) -> None:
        self._bits: Any = None  # kept, so that the address below stays good
        self._words = (ctypes.c_char * _TWISTER_BYTES)()

    def __call__(self) -> bytes:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if bits is not self._bits:
            if type(bits) is not np.random.MT19937:
                return b""
            self._words = (ctypes.c_char * _TWISTER_BYTES).from_address(bits.ctypes.state_address)
            self._bits = bits
        # The second of a pair of normal draws is kept in the object that draws, wherever in it.
        raw: bytes = self._words.raw + _NUMPY_OBJECT.raw
        return raw


def _behind_head(thing: object, nbytes: int) -> Any:
    """The memory of an object behind its head."""
    return (ctypes.c_char * nbytes).from_address(id(thing) + object.__basicsize__)


_drawing: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
_NUMPY_OBJECT = _behind_head(_drawing, type(_drawing).__basicsize__ - object.__basicsize__)
_python: Any = getattr(random, "_inst", None)
_PYTHON_LAYOUT = _python_layout()
_PYTHON_WORDS: Any = _behind_head(_python, _TWISTER_BYTES) if _PYTHON_LAYOUT else None

"""The codec under values and bytes that nobody thought of."""

import pathlib
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from exact import identical
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from syncstate.errors import CodecError
from syncstate.wire import decode, encode
from syncstate.wire.codec import MAX_DEPTH, pack, unpack, write_blobs
from syncstate.wire.vocabulary import BITS_FIRST, BITS_PREFIX, Code

SETTINGS = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

# Values.

texts = st.text(st.characters(exclude_categories=()), max_size=8)
complexes = st.builds(complex, st.floats(), st.floats())
integers = st.integers() | st.integers(-(2**70), 2**70)
plain_paths = st.text("ab/.\ud800 ", max_size=6)
windows_paths = st.builds(pathlib.PureWindowsPath, plain_paths).filter(lambda p: pathlib.PureWindowsPath(str(p)) == p)
paths = st.builds(pathlib.Path, plain_paths) | windows_paths
keys = st.none() | st.booleans() | integers | st.floats() | complexes | texts | st.binary(max_size=8) | paths
hashables = st.recursive(
    keys, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=6
)
numpy_dtypes = (
    npst.boolean_dtypes()
    | npst.integer_dtypes(endianness="?")
    | npst.unsigned_integer_dtypes(endianness="?")
    | npst.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | npst.complex_number_dtypes(endianness="?", sizes=(64, 128))
    | npst.datetime64_dtypes(endianness="?")
    | npst.timedelta64_dtypes(endianness="?")
    | npst.byte_string_dtypes(endianness="?", max_len=5)
    | npst.unicode_string_dtypes(endianness="?", max_len=5)
)
arrays = npst.arrays(numpy_dtypes, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
dtypes = st.sampled_from(
    [torch.uint8, torch.int16, torch.uint64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any bits, some large enough to lie beside the tree, some permuted, sliced or expanded."""
    dtype, shape, seed = draw(dtypes), draw(shapes), draw(st.integers(0, 2**32))
    if draw(st.booleans()):
        shape = [*shape, 2000]
    size = int(np.prod(shape)) * dtype.itemsize
    tensor = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size + dtype.itemsize, np.uint8)).view(dtype)
    tensor = tensor[1:].reshape(shape)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))[:: draw(st.integers(1, 2))]
    return tensor.expand(2, *tensor.shape) if draw(st.booleans()) else tensor


scalars = arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])
values = st.recursive(
    keys | arrays | tensors() | scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
        | st.frozensets(hashables, max_size=4)
    ),
    max_leaves=12,
)


@SETTINGS
@given(values)
def test_any_value_comes_back_exactly(value: Any) -> None:
    data = encode(value)
    back = decode(data)
    assert identical(back, value)
    assert encode(back) == data


@SETTINGS
@given(values, st.booleans(), st.booleans())
def test_any_value_comes_back_through_tree_and_region(value: Any, copy: bool, view: bool) -> None:
    parcel = pack(value)
    region = torch.zeros(parcel.blob_bytes, dtype=torch.uint8) if parcel.blobs else None
    if region is not None:
        write_blobs(parcel, region)
    assert identical(unpack(memoryview(parcel.tree) if view else parcel.tree, region, copy=copy), value)


# Bytes. Whatever they are, decoding gives a value or a CodecError and stays within its memory.

# What `encode` and `pack` promise for n bytes, see the codec's docstring.
PER_BYTE = 128
SLACK = 1 << 20


def attempt(decoder: Callable[[], Any], nbytes: int) -> Any:
    """Decodes; returns the value, or the CodecError; anything else fails the test."""
    tracemalloc.start()
    try:
        return decoder()
    except CodecError as error:
        return error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < PER_BYTE * nbytes + SLACK


def attempt_tree(tree: bytes, region: bytes = b"") -> Any:
    bits = torch.frombuffer(bytearray(region), dtype=torch.uint8) if region else None
    return attempt(lambda: unpack(tree, bits, copy=True), len(tree) + len(region))


@SETTINGS
@given(st.binary(max_size=300))
@example(b"")
@example(b"SSV1")
@example(b"SSV1\0\0\0\0" + b"\xff" * 8)
def test_random_bytes_do_no_harm(data: bytes) -> None:
    attempt(lambda: decode(data), len(data))
    attempt_tree(data)
    attempt_tree(data, data)


@SETTINGS
@given(values, st.data())
def test_changed_bytes_do_no_harm(value: Any, data: st.DataObject) -> None:
    changed = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, max(min(len(changed), 300) - 1, 0)))
        stop = start + data.draw(st.integers(0, 4))
        changed[start:stop] = data.draw(st.binary(max_size=4))
    attempt(lambda: decode(changed), len(changed))


@SETTINGS
@given(values, st.data())
def test_cut_and_lengthened_bytes_are_refused(value: Any, data: st.DataObject) -> None:
    whole = encode(value)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    longer = whole + data.draw(st.binary(min_size=1, max_size=100))
    for changed in (cut, longer):
        assert isinstance(attempt(partial(decode, changed), len(changed)), CodecError)


heads = st.builds(
    lambda dims, shape, name: bytes([dims % 256]) + struct.pack(f"<{len(shape)}q", *shape) + name,
    st.integers(0, 4) | st.integers(0, 255),
    st.lists(st.integers(0, 3) | st.sampled_from([-1, 2**31, 2**62, 2**63 - 1]), max_size=4),
    st.sampled_from(
        [b"float32", b"bool", b"bfloat16", b"<f4", b"|b1", b"<U2", b"|O", b"<M8[ns]", b"f4,f4", b"|V0", b""]
    ),
)
extensions = st.builds(
    lambda code, data: msgpack.ExtType(code, data), st.integers(0, 20), heads | st.binary(max_size=20)
)
marks = st.sampled_from([msgpack.ExtType(code, b"") for code in (Code.TUPLE, Code.SET, Code.FROZENSET)])
forged = st.recursive(
    st.none() | st.integers(-3, 300) | texts | extensions | marks | st.just(msgpack.Timestamp(1)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(marks, inner, inner).map(list)
        | st.dictionaries(st.integers(0, 3) | marks | extensions, inner, max_size=3)
    ),
    max_leaves=8,
)


@SETTINGS
@given(forged, st.binary(max_size=80), st.booleans())
def test_forged_trees_do_no_harm(value: Any, bits: bytes, first: bool) -> None:
    tree = msgpack.packb(value, unicode_errors="surrogatepass")
    result = attempt_tree(BITS_PREFIX.pack(BITS_FIRST, len(bits)) + bits + tree if first else tree, bits)
    if not isinstance(result, CodecError):
        assert identical(decode(encode(result)), result)  # what came out is a value, and nothing of the format itself


def extension(code: int, data: bytes) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(code, data))
    return packed


def head(name: bytes, *shape: int) -> bytes:
    return struct.pack(f"<B{len(shape)}q", len(shape), *shape) + name


def with_bits(bits: bytes, tree: bytes) -> bytes:
    return BITS_PREFIX.pack(BITS_FIRST, len(bits)) + bits + tree


FORGED: dict[str, tuple[bytes, bytes, str]] = {
    "empty": (b"", b"", "IndexError"),
    "trailing": (b"\xc0\xc0", b"", "ExtraData"),
    "cut": (b"\x92\xc0", b"", "incomplete"),
    "reserved": (b"\x91\xc1", b"", "FormatError"),
    "invalid utf-8": (b"\xa2\xff\xff", b"", "UnicodeDecodeError"),
    "list as key": (b"\x81\x90\xc0", b"", "unhashable"),
    "unknown extension": (extension(99, b"x"), b"", "unknown extension 99 of 1 bytes"),
    "negative extension": (b"\xd4\x80\x00", b"", "unknown extension -128"),
    "timestamp": (b"\x91\xd6\xff\0\0\0\1", b"", "type that cannot travel"),
    "timestamp as key": (b"\x81\xd6\xff\0\0\0\1\xc0", b"", "type that cannot travel"),
    "timestamp alone": (b"\xd6\xff\0\0\0\1", b"", "stands alone"),
    "mark alone": (extension(Code.TUPLE, b""), b"", "stands alone"),
    "mark second": (b"\x92\xc0" + extension(Code.TUPLE, b""), b"", "type that cannot travel"),
    "mark with data": (b"\x91" + extension(Code.TUPLE, b"x"), b"", "a mark carries data"),
    "list in a set": (b"\x92" + extension(Code.SET, b"") + b"\x90", b"", "unhashable"),
    "short complex": (extension(Code.COMPLEX, b"x"), b"", "16 bytes"),
    "tensor without bits": (extension(Code.TENSOR, head(b"float32", 2)), b"", "more are needed"),
    "tensor with few bits": (with_bits(bytes(7), extension(Code.TENSOR, head(b"float32", 2))), b"", "more are needed"),
    "tensor with many bits": (
        with_bits(bytes(9), extension(Code.TENSOR, head(b"float32", 2))),
        b"",
        "8 \\+ 0 are used",
    ),
    "array with few bits": (with_bits(bytes(7), extension(Code.ARRAY, head(b"<f4", 2))), b"", "buffer is too small"),
    "bits without tensor": (with_bits(b"x", b"\xc0"), b"", r"0 \+ 0 are used"),
    "more bits claimed than sent": (BITS_PREFIX.pack(BITS_FIRST, 2**63) + b"\xc0", b"", "ValueError|OverflowError"),
    "negative shape": (extension(Code.TENSOR, head(b"float32", -2, -2)), b"", "negative dimension"),
    "overflowing shape": (extension(Code.TENSOR, head(b"float32", 2**62, 4)), b"", "more are needed"),
    "overflowing empty shape": (extension(Code.ARRAY, head(b"<f4", 2**62, 4, 0)), b"", "too big"),
    "too many dimensions": (extension(Code.TENSOR, head(b"float32", *[1] * 65)), b"", "more than 64 dimensions"),
    "short header": (extension(Code.TENSOR, b"\x02" + bytes(9)), b"", "cut off"),
    "empty header": (extension(Code.ARRAY, b""), b"", "cut off"),
    "unknown dtype": (extension(Code.TENSOR, head(b"qint8", 1)), b"", "unknown dtype 'qint8'"),
    "object dtype": (extension(Code.ARRAY, head(b"|O", 1)), b"", "unknown dtype"),
    "structured dtype": (extension(Code.ARRAY, head(b"i4,i4", 1)), b"", "unknown dtype"),
    "dtype without bytes": (extension(Code.ARRAY, head(b"|V0", 2**40)), b"", "has no bytes"),
    "impossible dtype": (extension(Code.ARRAY, head(b"<f3", 1)), b"", "TypeError"),
    "object scalar": (extension(Code.SCALAR, b"\x01O" + bytes(8)), b"", "unknown NumPy scalar"),
    "short scalar": (extension(Code.SCALAR, b"\x01d" + bytes(7)), b"", "7 bytes instead of 8"),
    "odd bool": (with_bits(b"\2", extension(Code.TENSOR, head(b"bool", 1))), b"", "other than 0 and 1"),
    "odd bool scalar": (extension(Code.SCALAR, b"\x01?\2"), b"", "other than 0 and 1"),
    "no characters": (with_bits(b"\xff" * 4, extension(Code.ARRAY, head(b"<U1", 1))), b"", "no characters"),
    "blob without region": (extension(Code.TENSOR_BLOB, head(b"uint8", 9)), b"", "outside the bytes"),
    "blob beyond the region": (extension(Code.TENSOR_BLOB, head(b"uint8", 9)), bytes(8), "outside the bytes"),
    "huge blob": (extension(Code.ARRAY_BLOB, head(b"|u1", 2**50)), bytes(8), "outside the bytes"),
    "leftover region": (extension(Code.ARRAY_BLOB, head(b"|u1", 8)), bytes(9), r"0 \+ 8 are used"),
    "region without blob": (b"\xc0", bytes(1), r"0 \+ 0 are used"),
    "deep": (b"\x91" * (MAX_DEPTH + 1) + b"\xc0", b"", f"nested deeper than {MAX_DEPTH}"),
    "deep key": (b"\x81" * (MAX_DEPTH + 1) + b"\xc0" * (MAX_DEPTH + 2), b"", "unhashable"),
    "deeper": (b"\x91" * 100_000 + b"\xc0", b"", f"nested deeper than {MAX_DEPTH}"),
    "nested claims": (b"\xdd\x00\x01\x00\x00" * 1000 + b"\xc0" * 66_000, b"", "incomplete|nested|OutOfData"),
    "long claim": (b"\xdd\xff\xff\xff\xff", b"", "exceeds"),
    "long text": (b"\xdb\xff\xff\xff\xff", b"", "incomplete"),
    "pickle": (extension(Code.PICKLE, pickle.dumps(1)), b"", "holds a pickle"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_bytes_are_refused_with_the_reason(name: str) -> None:
    tree, region, message = FORGED[name]
    error = attempt_tree(tree, region)
    assert isinstance(error, CodecError)
    with pytest.raises(CodecError, match=message):
        raise error


CROWDS = {
    "lists": b"\x90",
    "dicts": b"\x80",
    "dicts of one": b"\x81\xc0\xc0",
    "sets": b"\x91" + extension(Code.SET, b""),
    "sets of one": b"\x92" + extension(Code.SET, b"") + b"\xc0",
    "tuples": b"\x91" + extension(Code.TUPLE, b""),
    "paths": extension(Code.PATH, b"a"),
    "paths of many parts": extension(Code.PATH, b"a/" * 40),
    "empty tensors": extension(Code.TENSOR, head(b"bool", 0)),
    "empty arrays": extension(Code.ARRAY, head(b"|b1", 0)),
    "scalars": extension(Code.SCALAR, b"\x01b\0"),
    "wide text": b"\xd9\xff" + b"a" * 251 + "\U0001f40d".encode(),
}


@pytest.mark.parametrize("name", CROWDS)
def test_crowds_of_small_values_stay_within_the_bound(name: str) -> None:
    count = 60_000 // len(CROWDS[name])
    tree = b"\xdc" + struct.pack(">H", count) + CROWDS[name] * count
    assert len(attempt_tree(tree)) == count


class Trap:
    """Pickles to an instruction that makes a directory when it is loaded."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[pathlib.Path], None], tuple[pathlib.Path]]:
        return pathlib.Path.mkdir, (self.path,)


def test_pickles_stay_inert_unless_asked_for(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "made"
    armed = encode([1, Trap(target)], allow_pickle=True)
    with pytest.raises(CodecError, match="holds a pickle"):
        decode(armed)
    for data in (pickle.dumps(Trap(target)), b"SSV1" + pickle.dumps(Trap(target))):
        with pytest.raises(CodecError):
            decode(data)
    assert not target.exists()
    decode(armed, allow_pickle=True)
    assert target.exists()


def test_a_pickle_that_fails_to_load_is_a_codec_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CodecError, match="FileExistsError"):
        decode(encode(Trap(tmp_path), allow_pickle=True), allow_pickle=True)


@pytest.mark.parametrize("data", [None, 3, "text", [1], np.zeros((2, 2))[:, 0]])
def test_what_is_not_bytes_is_refused(data: Any) -> None:
    with pytest.raises(CodecError, match="not bytes"):
        decode(data)

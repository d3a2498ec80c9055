import enum
import math
import os
import pathlib
import struct
import subprocess
import sys
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exact import identical
from ranks import returned, run_ranks

from syncstate.errors import CodecError
from syncstate.wire import arrays, decode, encode
from syncstate.wire.codec import INLINE_BYTES, MAX_DEPTH, Parcel, pack, unpack, write_blobs

BIG = INLINE_BYTES  # so many elements of any dtype beyond one byte do not fit into the tree

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTS, *FLOATS, *FLOAT8, *COMPLEX, torch.float4_e2m1fn_x2]

NUMPY_DTYPES = [
    *("?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G"),
    *(">i2", ">i8", ">u4", ">f4", ">f8", ">c16", "<M8[ns]", ">M8[D]", "<M8[25us]", "<m8[s]", "<M8"),
    *("U5", ">U3", "S7", "V6"),
]


def some_bits(nbytes: int) -> bytearray:
    return bytearray((7 * i * i + 13 * i + 5) % 256 for i in range(nbytes))


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor with all kinds of bits, NaNs among them."""
    size = dtype.itemsize * max(math.prod(shape), 1)
    bits = bytearray(b % 2 for b in some_bits(size)) if dtype is torch.bool else some_bits(size)
    if math.prod(shape) == 0:
        return torch.frombuffer(bits, dtype=torch.uint8).view(dtype)[:0].reshape(shape)
    return torch.frombuffer(bits, dtype=torch.uint8).view(dtype).reshape(shape)


def array_of(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.kind in "US":
        texts = ["ab", "", "\U0001f40d", "c\ud800"] if kind.kind == "U" else [b"ab", b"", b"\xff"]
        return np.resize(np.array(texts, kind), shape)
    bits = some_bits(kind.itemsize * math.prod(shape))
    return np.frombuffer(bytearray(b % 2 for b in bits) if kind.kind == "b" else bits, kind).reshape(shape)


def signaling_nan() -> float:
    value: float = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0ABC))[0]
    return value


# Every value is made anew by its function, on each rank.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "bools": lambda: [True, False, 1, 0, 1.0],
    "ints": lambda: [0, -1, 2**31, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 3**500, -(3**500)],
    "floats": lambda: [0.0, -0.0, 0.1, 5e-324, math.inf, -math.inf, math.nan, -math.nan, signaling_nan()],
    "complex": lambda: [1j, complex(-0.0, math.nan), complex(signaling_nan(), math.inf)],
    "texts": lambda: ["", "a", "\0", "ä€\U0001f40d", "\ud800", "a\udfff\ud800b", "x" * 70_000],
    "bytes": lambda: [b"", b"\0\xff", bytes(70_000)],
    "paths": lambda: [
        pathlib.Path("a/b"),
        pathlib.Path("."),
        pathlib.Path("/"),
        pathlib.Path("\udc80"),
        pathlib.Path("//x"),
    ],
    "pure paths": lambda: [
        pathlib.PurePosixPath("a\\b"),
        pathlib.PureWindowsPath("c:/a"),
        pathlib.PureWindowsPath("//h/s"),
    ],
    "lists": lambda: [[], [[]], [1, [2.0, ["3"]]], list(range(70_000))],
    "tuples": lambda: [(), ((),), (1, [2, (3,)]), tuple(range(20))],
    "dicts": lambda: [{}, {"b": 1, "a": {"z": [], "y": ()}}, {i: str(i) for i in (3, 1, 2)}],
    "dict keys": lambda: {
        None: 0,
        1: 1,
        "1": 2,
        1.5: 3,
        (1, (2, "x")): 4,
        b"1": 5,
        frozenset({1, "a"}): 6,
        2**70: 7,
        1j: 8,
    },
    "sets": lambda: [set(), {3, 1, 2}, {"b", "a"}, {1, "1", b"1", 1.5, None, (1,)}, {math.nan, -0.0}, {2**70, 2**80}],
    "frozensets": lambda: [frozenset(), frozenset({1, frozenset({"x", 2, frozenset({None, 1.5})})})],
    "numpy scalars": lambda: [np.dtype(c).type(1) for c in "?bBhHiIlLqQefdgFDG"],
    "other numpy scalars": lambda: [
        np.float32("nan"),
        np.float64(-0.0),
        np.datetime64("2020-01-01T00:00:01.5", "ms"),
        np.datetime64("NaT"),
        np.timedelta64(3, "h"),
        np.str_("a\ud800\0"),
        np.str_(""),
        np.bytes_(b"a\0"),
        np.void(b"abc"),
    ],
    **{f"tensor {dtype}".replace("torch.", ""): partial(tensor_of, dtype, 3, 5) for dtype in DTYPES},
    **{f"0-dim {dtype}".replace("torch.", ""): partial(tensor_of, dtype) for dtype in DTYPES},
    **{f"empty {dtype}".replace("torch.", ""): partial(tensor_of, dtype, 2, 0, 3) for dtype in DTYPES},
    **{f"large {dtype}".replace("torch.", ""): partial(tensor_of, dtype, 2, BIG) for dtype in DTYPES},
    **{f"array {dtype}": partial(array_of, dtype, 3, 4) for dtype in NUMPY_DTYPES},
    **{f"0-dim array {dtype}": partial(array_of, dtype) for dtype in NUMPY_DTYPES},
    **{f"empty array {dtype}": partial(array_of, dtype, 2, 0) for dtype in NUMPY_DTYPES},
    **{f"large array {dtype}": partial(array_of, dtype, 2, BIG) for dtype in NUMPY_DTYPES},
    "column": lambda: torch.arange(12.0).view(3, 4)[:, 1],
    "large column": lambda: torch.arange(8.0 * BIG).view(2 * BIG, 4)[:, 1],
    "one of a column": lambda: torch.arange(12.0).view(3, 4)[:1, 1],
    "one lazily conjugated of a column": lambda: torch.ones(3, 4, dtype=torch.complex64)[:1, 1].conj(),
    "one large of a column": lambda: np.resize(np.array([b"ab"], f"S{2 * BIG}"), (3, 2))[:1, 1],
    "transposed": lambda: torch.arange(12).view(3, 4).t(),
    "expanded": lambda: torch.arange(3).view(3, 1).expand(3, 4),
    "channels_last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugated": lambda: tensor_of(torch.complex64, 3, 4).conj(),
    "large conjugated": lambda: tensor_of(torch.complex128, BIG).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "large negated": lambda: tensor_of(torch.complex64, BIG).conj().imag,
    "lazy zeros": lambda: torch._efficientzerotensor(3),
    "slice": lambda: torch.arange(1_000_000.0)[5:9],
    "every other": lambda: np.arange(20)[::-2],
    "Fortran order": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "large Fortran order": lambda: np.asfortranarray(np.arange(2.0 * BIG).reshape(2, BIG)),
    "broadcast": lambda: np.broadcast_to(np.arange(3), (BIG, 3)),
    "mixed": lambda: {
        "a": (torch.ones(2), [np.ones(BIG), {torch.float32.itemsize, "x"}]),
        "b": [tensor_of(torch.uint8, BIG + 1), np.float32(1), tensor_of(torch.bfloat16, BIG), torch.ones(0)],
        "c": torch.ones(5, dtype=torch.int16),
    },
}


@pytest.mark.parametrize("name", VALUES)
def test_value_comes_back_with_its_types_and_bits(name: str) -> None:
    value = VALUES[name]()
    assert identical(decode(encode(value)), value)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_value_comes_back_through_tree_and_region(copy: bool, shift: int) -> None:
    values = [make() for make in VALUES.values()]
    parcel = pack(values)
    buffer = torch.full((parcel.blob_bytes + shift,), 255, dtype=torch.uint8)
    write_blobs(parcel, buffer[shift:])
    assert identical(unpack(memoryview(parcel.tree), buffer[shift:], copy=copy), values)


def received(rank: int) -> list[str]:
    """Broadcasts all values; returns the names of those that arrived otherwise."""
    data = torch.frombuffer(bytearray(encode([make() for make in VALUES.values()])), dtype=torch.uint8)
    buffer = data if rank == 0 else torch.zeros_like(data)
    dist.broadcast(buffer, 0)
    arrived = decode(buffer.numpy().data)
    return [name for (name, make), value in zip(VALUES.items(), arrived, strict=True) if not identical(value, make())]


def test_every_value_arrives_exactly_on_the_other_rank() -> None:
    assert returned(run_ranks(received, 2)) == [[], []]


def test_parameter_arrives_as_tensor_and_requires_grad_is_dropped() -> None:
    for value in (
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
        torch.ones(BIG, requires_grad=True),
    ):
        back = decode(encode(value))
        assert type(back) is torch.Tensor
        assert not back.requires_grad
        assert identical(back, value.detach().as_subclass(torch.Tensor))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("size", [3, BIG])
def test_cuda_tensor_comes_back_on_the_cpu(size: int) -> None:
    value = torch.arange(float(size))
    assert identical(decode(encode(value.cuda())), value)


def test_slice_of_a_large_storage_costs_the_slice() -> None:
    assert len(encode(torch.arange(1_000_000.0)[5:9])) < 100


@pytest.mark.parametrize("size", [3, BIG])
def test_read_only_arrays_come_back_writeable_and_stay_as_they_were(size: int) -> None:
    value = np.arange(float(size))
    value.flags.writeable = False
    back = decode(encode(value))
    back[0] = 7
    assert value[0] == 0


def test_decoded_tensors_and_arrays_can_be_written_without_touching_each_other() -> None:
    back = decode(encode([make(size) for make in (torch.zeros, np.zeros) for size in (3, 3, BIG, BIG)]))
    for i, value in enumerate(back):
        value[:] = i
    assert [float(value.max()) for value in back] == [float(value.min()) for value in back] == list(range(8))


# Tree and region.


def test_large_contiguous_memory_is_not_copied() -> None:
    tensor = torch.nn.Parameter(torch.zeros(BIG))
    array = np.zeros(BIG)
    frozen = np.zeros(BIG)
    frozen.flags.writeable = False
    parcel = pack([tensor, array, frozen])
    assert [blob.data_ptr() for blob in parcel.blobs] == [tensor.data_ptr(), array.ctypes.data, frozen.ctypes.data]


def test_blobs_are_flat_bytes_at_multiples_of_64() -> None:
    parcel = pack([torch.zeros(BIG + 1, dtype=torch.uint8), np.zeros(BIG, "i2"), torch.zeros(2, BIG)])
    assert [(blob.dtype, tuple(blob.shape)) for blob in parcel.blobs] == [
        (torch.uint8, (4097,)),
        (torch.uint8, (8192,)),
        (torch.uint8, (32768,)),
    ]
    assert parcel.offsets == [0, 4160, 12352]
    assert parcel.blob_bytes == 45120


def test_small_values_need_no_region() -> None:
    parcel = pack([1, torch.zeros(3), np.zeros(3)])
    assert (parcel.blobs, parcel.offsets, parcel.blob_bytes) == ([], [], 0)
    assert len(unpack(parcel.tree, None, copy=True)) == 3


def region_of(parcel: Parcel) -> torch.Tensor:
    region = torch.zeros(parcel.blob_bytes, dtype=torch.uint8)
    write_blobs(parcel, region)
    return region


@pytest.mark.parametrize("name", ["large int64", "large bfloat16", "large array d"])
def test_copy_gives_memory_of_its_own_and_no_copy_a_view(name: str) -> None:
    make = VALUES[name]
    parcel = pack(make())
    region = region_of(parcel)
    own, view = (unpack(parcel.tree, region, copy=copy) for copy in (True, False))
    region.zero_()
    assert identical(own, make())
    assert not view.any()


def test_write_blobs_leaves_the_rest_of_the_region_alone() -> None:
    parcel = pack([torch.zeros(BIG + 1, dtype=torch.uint8), torch.zeros(BIG + 1, dtype=torch.uint8)])
    into = torch.full((parcel.blob_bytes + 10,), 9, dtype=torch.uint8)
    write_blobs(parcel, into)
    assert into.nonzero().flatten().tolist() == [*range(4097, 4160), *range(8257, 8267)]


def test_region_must_be_flat_bytes() -> None:
    parcel = pack(torch.ones(BIG))
    for region in (
        torch.zeros(BIG),
        torch.zeros(4, BIG, dtype=torch.uint8),
        torch.zeros(8 * BIG, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(CodecError, match="1-D uint8"):
            unpack(parcel.tree, region, copy=True)


def test_tensors_decoded_in_inference_mode_can_be_trained_on() -> None:
    data = encode([torch.ones(3), torch.ones(BIG)])
    with torch.inference_mode():
        back = decode(data)
        inference = torch.ones(3)
    assert [value.is_inference() for value in back] == [False, False]
    assert identical(decode(encode(inference)), torch.ones(3))


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        back = decode(encode([tensor_of(torch.bfloat16, 3), np.ones(3)]))
    assert identical(back, [tensor_of(torch.bfloat16, 3), np.ones(3)])


def test_caches_of_headers_are_bounded() -> None:
    for size in range(2500):
        assert identical(decode(encode([torch.zeros(1, size, 0), np.zeros((1, size, 0))]))[1], np.zeros((1, size, 0)))
    caches: list[dict[Any, Any]] = [
        arrays.TENSOR_LAYOUTS,
        arrays.ARRAY_LAYOUTS,
        arrays.TENSOR_HEADS,
        arrays._ARRAY_HEADS,
    ]
    assert all(0 < len(cache) <= arrays._CACHE_SIZE for cache in caches)


def test_threads_can_encode_at_the_same_time() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        value = [seed, torch.full((5,), seed), {str(seed): np.full(BIG, seed)}, {seed, "x"}]
        wrong.extend(i for i in range(200) if not identical(decode(encode(value)), value))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# The order of what has none.

ORDER = """
import sys
from syncstate.wire import encode
names = [f"name{i}" for i in range(50)]
value = [set(names), {1, 2.5, None, b"x", *names, (1, "a")}, {frozenset(names[:5]), frozenset(names[3:9]), "y"}]
sys.stdout.write(encode(value).hex())
"""


def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    outputs = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        outputs.add(subprocess.run([sys.executable, "-c", ORDER], env=env, check=True, capture_output=True).stdout)
    assert len(outputs) == 1


def test_sets_of_tensors_are_ordered_by_content() -> None:
    small, large = [torch.full((3,), i) for i in range(20)], [torch.full((BIG,), i) for i in range(5)]
    assert encode({*small, *large}) == encode({*large[::-1], *small[::-1]})


def test_deeply_nested_sets_take_linear_time() -> None:
    value: Any = frozenset({0, "a"})
    for i in range(60):
        value = frozenset({value, i, "a"})
    assert identical(decode(encode(value)), value)


# What cannot travel.


class Color(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


class Tensor2(torch.Tensor):
    pass


Pair = namedtuple("Pair", "a b")

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: {"indices": [1, 2, 3, {"fn": len}]}, r"indices\[3\]\.fn of type builtin_function_or_method"),
    "nested object": (lambda: {"a": [object()]}, r"a\[0\] of type object"),
    "odd key": (lambda: [{"a b": {1: (1, object())}}], r"\[0\]\['a b'\]\[1\]\[1\] of type object"),
    "bad key": (lambda: {"x": {(1, Name("a")): 2}}, r"x<key \(1, 'a'\)>\[1\] of type .*Name: send str\(x\)"),
    "in a set": (lambda: {"x": {1, Color.RED + 1, Name("a")}}, r"x\{'a'\} of type .*Name"),
    "root": (object, "the value of type object: allowed, as exact types: None, bool"),
    "enum": (lambda: Color.RED, r"Color: send x\.value"),
    "bytearray": (lambda: bytearray(b"a"), r"bytearray: send bytes\(x\)"),
    "memoryview": (lambda: [memoryview(b"a")], r"\[0\] of type memoryview: send bytes\(x\)"),
    "namedtuple": (lambda: Pair(1, 2), r"Pair: send tuple\(x\)"),
    "size": (lambda: torch.ones(2).shape, r"torch\.Size: send tuple\(x\)"),
    "ordered dict": (lambda: OrderedDict(a=1), r"OrderedDict: send dict\(x\)"),
    "range": (lambda: range(3), r"range: send list\(x\)"),
    "generator": (lambda: (x for x in "ab"), r"generator: send list\(x\)"),
    "dtype": (lambda: torch.float32, r"torch\.dtype: send str\(x\)"),
    "module": (lambda: torch.nn.Linear(1, 1), r"send dict\(x\.state_dict\(\)\)"),
    "masked": (lambda: np.ma.array([1]), r"MaskedArray: send x\.filled\(\)"),
    "matrix": (lambda: np.array([1]).view(np.recarray), r"send np\.asarray\(x\)"),
    "object array": (lambda: np.array([None]), "the dtype object cannot travel"),
    "structured": (lambda: np.zeros(2, [("a", "f4")]), "the dtype .* cannot travel"),
    "structured scalar": (lambda: np.zeros(2, [("a", "f4")])[0], "the dtype .* cannot travel"),
    "string dtype": (lambda: np.array(["a"], np.dtypes.StringDType()), "the dtype .* cannot travel"),
    "sparse": (
        lambda: [torch.eye(3).to_sparse()],
        r"\[0\] of type torch\.Tensor: .*torch\.sparse_coo.* x\.to_dense\(\)",
    ),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), r"torch\.sparse_csr.* x\.to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested tensor"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        r"torch\.quint8 cannot travel",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "meta tensor has no data"),
    "subclass": (lambda: torch.ones(3).as_subclass(Tensor2), r"Tensor2: send x\.as_subclass\(torch\.Tensor\)"),
    "weird bools": (lambda: torch.tensor([2], dtype=torch.uint8).view(torch.bool), "other than 0 and 1"),
    "large weird bools": (lambda: np.full(BIG + 1, 2, np.uint8).view(bool), "other than 0 and 1"),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|quantize_per_tensor)")
@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_path_type_and_what_to_send(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(CodecError, match=f"cannot encode .*{message}"):
        encode(make())


@pytest.mark.parametrize("text", ["//a/", "//a//", "//a", "//a/b", "/a", "c:a"])
def test_windows_path_that_pathlib_reads_as_another_is_refused(text: str) -> None:
    path = pathlib.PureWindowsPath(text)
    if pathlib.PureWindowsPath(str(path)) == path:  # which of them are so depends on the version of Python
        assert identical(decode(encode(path)), path)
    else:
        with pytest.raises(CodecError, match="another path"):
            encode(path)


def test_freed_storage_is_refused_before_it_is_read() -> None:
    for shape in ((3,), (3, BIG)):
        whole = torch.ones(shape)
        parts = [whole, whole[1:], whole.view(-1)[::2]]
        whole.untyped_storage().resize_(0)
        for part in parts:
            with pytest.raises(CodecError, match="freed"):
                encode(part)


def test_tensor_inside_vmap_is_refused() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(CodecError, match="cannot be read"):
            encode(x)
        return x

    torch.vmap(inner)(torch.ones(2, 3))


class Shy:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_failing_repr_does_not_hide_the_refusal() -> None:
    with pytest.raises(CodecError, match=r"<key a test_codec\.Shy> of type test_codec\.Shy"):
        encode({Shy(): 1})


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = wrap(0)
    for _ in range(depth - 1):
        value = wrap(value)
    return value


WRAPS: list[Callable[[Any], Any]] = [
    lambda x: [x],
    lambda x: (x,),
    lambda x: {"a": x},
    lambda x: frozenset({x}),
    lambda x: frozenset({x, 1, "a"}),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_depth_is_limited(wrap: Callable[[Any], Any]) -> None:
    deepest = nested(MAX_DEPTH, wrap)
    assert encode(decode(encode(deepest))) == encode(deepest)
    with pytest.raises(CodecError, match=f"nested deeper than {MAX_DEPTH} levels"):
        encode(nested(MAX_DEPTH + 1, wrap))


def test_cycle_is_told_as_such() -> None:
    value: dict[str, Any] = {}
    value["self"] = [value, value]
    with pytest.raises(CodecError, match="contains itself"):
        encode(value)


# Pickle, where it is asked for.


class Plain:
    def __init__(self, x: int) -> None:
        self.x = x


def test_pickle_carries_only_what_nothing_else_can() -> None:
    value = [Plain(1), Pair(1, 2), torch.ones(2), (3,), np.array([None])]
    back = decode(encode(value, allow_pickle=True), allow_pickle=True)
    assert (back[0].x, back[1], type(back[1])) == (1, Pair(1, 2), Pair)
    assert identical(back[2:], value[2:])
    plain = [torch.ones(2), (3,), {"a"}, 2**70]
    assert encode(plain, allow_pickle=True) == encode(plain)


def test_pickle_is_refused_unless_both_sides_allow_it() -> None:
    with pytest.raises(CodecError, match="allow_pickle=True on all ranks"):
        encode([Plain(1)])
    with pytest.raises(CodecError, match="holds a pickle"):
        decode(encode([Plain(1)], allow_pickle=True))


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CodecError, match=r"a\[1\] of type function: it cannot be pickled"):
        encode({"a": [1, lambda: 0]}, allow_pickle=True)


def refuses_dtensor(rank: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    value = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)))
    with pytest.raises(CodecError) as caught:
        encode({"w": value})
    return str(caught.value)


def test_dtensor_is_refused_with_the_way_to_its_shard() -> None:
    for message in returned(run_ranks(refuses_dtensor, 2)):
        assert message.startswith("cannot encode w of type torch.distributed.tensor.DTensor: send x.to_local()")

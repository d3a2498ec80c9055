"""Frames: how a payload is laid out, and that bytes from elsewhere make a value or a CodecError and cost no memory."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exact import identical
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ranks import returned, run_ranks

from syncstate import Every, SharedState, SyncEngine
from syncstate.errors import CodecError, MismatchError, SyncStateError
from syncstate.loop.batch import Batch
from syncstate.loop.line import Line
from syncstate.loop.options import Options
from syncstate.loop.passage import Inbound
from syncstate.loop.payload import Contents
from syncstate.loop.plan import Plan
from syncstate.loop.rules import Rules
from syncstate.loop.sources import Failure
from syncstate.topology import Topology
from syncstate.wire.channel import Channel
from syncstate.wire.codec import pack, unpack
from syncstate.wire.frame import HEADER_BYTES, Frame, Kind, Lengths, Stamp
from syncstate.wire.vocabulary import aligned

FRAME = 1024
CAPACITY = FRAME - HEADER_BYTES
LIMIT = 1 << 16
STAMP = Stamp(sequence=3, step=70, epoch=2, plan=b"planplan", due=b"duedue12")
LENGTHS_AT = len(STAMP.prefix())
SETTINGS = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def written(value: Any, kind: Kind = Kind.VALUES, limit: int = LIMIT) -> tuple[Frame, torch.Tensor | None]:
    frame = Frame(FRAME, limit)
    return frame, frame.write(STAMP, kind, pack(value))


def received(buffer: torch.Tensor, limit: int = LIMIT) -> Frame:
    """A frame as another rank has it: the same bytes in memory of its own."""
    frame = Frame(FRAME, limit)
    frame.buffer.copy_(buffer)
    return frame


def read(frame: Frame, body: torch.Tensor | None) -> Any:
    lengths = frame.lengths()
    assert lengths.body == (0 if body is None else body.numel())
    tree, region = frame.payload(lengths, body)
    return unpack(tree, region, copy=body is None)


# Layout

LAYOUTS: dict[str, tuple[Any, Callable[[Lengths], bool]]] = {
    "a tree in the frame": ([1, "x"], lambda n: n.region == n.body == 0),
    "a tree that fills the frame": (b"x" * (CAPACITY - 3), lambda n: n.tree == CAPACITY and n.body == 0),
    "a tree that does not fit": (b"x" * (CAPACITY - 2), lambda n: n.region == 0 and n.body == n.tree == CAPACITY + 1),
    "one tensor beside a small tree": (torch.arange(2000.0), lambda n: n.body == n.region == 8000),
    "tensors beside a small tree": (
        [torch.ones(2000), np.ones(5000, "i1")],
        lambda n: n.body == n.region == 8000 + 5000,
    ),
    "tensors beside a large tree": (["x" * 2000, torch.ones(2000)], lambda n: n.body == aligned(n.tree) + n.region),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_payload_lies_in_the_frame_or_in_a_body_of_the_exact_length(name: str) -> None:
    value, as_expected = LAYOUTS[name]
    frame, body = written(value)
    assert as_expected(frame.lengths())
    assert identical(read(received(frame.buffer), body), value)


def test_a_region_that_fits_lies_in_the_frame_behind_the_tree() -> None:
    tensor = torch.arange(5000, dtype=torch.uint8)
    value = ["ab", tensor]
    frame = Frame(8192, LIMIT)
    assert frame.write(STAMP, Kind.VALUES, pack(value)) is None
    lengths = frame.lengths()
    assert (lengths.region, lengths.body) == (5000, 0)
    assert torch.equal(frame.buffer[HEADER_BYTES + aligned(lengths.tree) :][:5000], tensor)
    assert identical(read(frame, None), value)


def test_a_single_tensor_is_sent_without_a_copy() -> None:
    tensor = torch.arange(2000.0)
    _, body = written([tensor, 3])
    assert body is not None
    assert body.data_ptr() == tensor.data_ptr()


def test_a_receiver_knows_its_own_stamp_and_reads_any_other() -> None:
    frame, _ = written([1])
    assert frame.begins(STAMP.prefix())
    for field in STAMP._fields:
        changed: dict[str, Any] = {field: b"otherone" if field in ("plan", "due") else 99}
        other = STAMP._replace(**changed)
        assert not frame.begins(other.prefix())
    assert frame.stamp() == STAMP


def test_a_payload_above_the_limit_is_not_written_and_not_read() -> None:
    value = torch.zeros(LIMIT + 1, dtype=torch.uint8)
    with pytest.raises(CodecError, match=f"more than max_bytes={LIMIT}; share less or give the engine a larger"):
        written(value)
    frame, _ = written(value, limit=2 * LIMIT)
    with pytest.raises(CodecError, match=f"more than max_bytes={LIMIT}$"):
        received(frame.buffer).lengths()


def test_an_error_gets_through_however_little_is_allowed_but_never_with_a_body() -> None:
    frame, body = written(["compute", "x" * 300, []], Kind.ERROR, limit=1)
    assert body is None
    assert read(received(frame.buffer, limit=1), None) == ["compute", "x" * 300, []]
    big, _ = written("x" * 5000, Kind.ERROR)
    with pytest.raises(CodecError, match=r"more than max_bytes=1$"):
        received(big.buffer, limit=1).lengths()


@SETTINGS
@given(
    kind=st.sampled_from(["compute", "mismatch"]),
    text=st.text(st.characters(exclude_categories=()), max_size=50).flatmap(
        lambda part: st.integers(0, 2000).map(lambda n: part * n)
    ),
    names=st.lists(st.text(st.characters(exclude_categories=()), max_size=40), max_size=60),
    size=st.sampled_from([1024, 1088, 4096, 16384]),
)
@example(kind="compute", text="€" * 5000, names=["ä" * 30] * 40, size=1024)
def test_every_failure_fits_into_a_frame(kind: str, text: str, names: list[str], size: int) -> None:
    frame = Frame(size, 1)
    assert frame.write(STAMP, Kind.ERROR, Failure(kind, text, names).pack(frame.capacity)) is None
    arrived = Failure(*read(frame, None))
    assert arrived.kind == kind
    plain = text.encode("utf-8", "backslashreplace").decode()
    if arrived.text != plain:
        start, end = arrived.text.split("\n[...]\n")
        assert plain.startswith(start.rstrip("\ufffd"))  # a letter may have been cut through
        assert plain.endswith(end.lstrip("\ufffd"))
        assert len(arrived.text.encode()) > size // 4
    assert arrived.names in (names, [])


# Bytes from elsewhere

RAW_LENGTHS = struct.Struct("<qqqq")
whole = st.integers(-(2**63), 2**63 - 1)
near = st.sampled_from([0, 1, CAPACITY, CAPACITY + 1, LIMIT, LIMIT + 1]).flatmap(
    lambda n: st.integers(-65, 65).map(lambda more: n + more)
)
lengths = st.tuples(st.sampled_from([1, 2]) | whole, *[near | whole] * 3)


@SETTINGS
@given(lengths)
@example((1, 5, 64, 64 + 64))
@example((1, 1, LIMIT, LIMIT))
@example((1, 2**62, 2**62, 2**62))
def test_any_lengths_are_refused_or_stay_within_the_limit_and_the_bytes(numbers: tuple[int, int, int, int]) -> None:
    frame, _ = written([1])
    RAW_LENGTHS.pack_into(frame.buffer.numpy().data, LENGTHS_AT, *numbers)
    try:
        found = frame.lengths()
    except CodecError:
        return
    kind, tree, region, nbytes = found
    assert found == numbers
    assert kind in (Kind.VALUES, Kind.ERROR)
    assert 0 <= nbytes <= LIMIT
    assert nbytes in (0, region, (aligned(tree) if region else tree) + region)
    encoded, blobs = frame.payload(found, torch.zeros(nbytes, dtype=torch.uint8) if nbytes else None)
    assert len(encoded) == tree
    assert (0 if blobs is None else blobs.numel()) == region


def receiver(names: str = "ab") -> tuple[Line, Batch, Stamp]:
    """A rank that is not main, without a group behind it: what it receives is what lies in its frame already."""
    state = SharedState({name: lambda ctx: 0 for name in names})
    plan = Plan(state, Options(), {})
    topology = Topology(rank=1, world_size=2, main=0, global_ranks=(0, 1))
    rules = Rules(plan.digest[:8], 0, FRAME, LIMIT, False)
    line = Line(Channel(topology, None), rules, "blocking", "blocking", 1)
    batch = Batch(plan.entries, state)
    return line, batch, line.stamp(batch, {"step": 7, "epoch": 0})


def receive(frame_bytes: bytes, body: bytes = b"") -> Any:
    """What a receiver makes of a frame and the body that follows: values, a Failure, or the error that it raises."""
    line, batch, stamp = receiver()
    prefix = stamp.prefix()
    data = prefix + frame_bytes[len(prefix) :] if frame_bytes[:4] == b"mine" else frame_bytes
    frame = line.frame(batch)
    frame.buffer.copy_(torch.frombuffer(bytearray(data.ljust(FRAME, b"\0")[:FRAME]), dtype=torch.uint8))
    taken: list[int] = []
    take = line.pool.take

    def watch(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        buffer = take(nbytes)
        buffer.copy_(torch.frombuffer(bytearray(body.ljust(nbytes, b"\0")[:nbytes]), dtype=torch.uint8))
        return buffer

    line.pool.take = watch  # type: ignore[method-assign]
    result: Any
    try:
        result = Inbound(line, batch, stamp, frame).finish()
    except (CodecError, MismatchError) as error:
        result = error
    if isinstance(result, Contents):
        assert (result.intervals, result.item_bytes) == ([], 0)
        result = result.values
    assert all(0 < nbytes <= LIMIT for nbytes in taken)
    return result


def frame_of(value: Any, kind: int = Kind.VALUES) -> tuple[bytes, bytes]:
    frame, body = written(value, Kind.VALUES)
    RAW_LENGTHS.pack_into(frame.buffer.numpy().data, LENGTHS_AT, kind, *frame.lengths()[1:])
    return b"mine" + frame.buffer.numpy().tobytes()[4:], b"" if body is None else body.numpy().tobytes()


def acceptable(result: Any) -> bool:
    """Two values, a failure, or an error that says so."""
    if isinstance(result, Failure):
        kinds = isinstance(result.kind, str), isinstance(result.text, str), isinstance(result.names, list)
        return all(kinds) and isinstance(result.error(), SyncStateError)
    return isinstance(result, (CodecError, MismatchError)) or (isinstance(result, list) and len(result) == 2)


def test_a_good_frame_is_received() -> None:
    big = torch.arange(4000.0)
    assert receive(*frame_of([1, "x"])) == [1, "x"]
    assert identical(receive(*frame_of([big, ["x" * 2000]])), [big, ["x" * 2000]])
    assert receive(*frame_of(["compute", "boom", ["a"]], Kind.ERROR)) == Failure("compute", "boom", ["a"])


@pytest.mark.parametrize("value", [None, [1], [1, 2, 3], {"a": 1, "b": 2}, (1, 2), "ab"])
def test_something_else_than_a_list_of_the_due_values_is_refused(value: Any) -> None:
    assert isinstance(receive(*frame_of(value)), CodecError)


@pytest.mark.parametrize("value", [None, [1], ["compute"], ["compute", "x", ["a"], 1], {"a": 1}, "abc", [1, 2, 3]])
def test_an_error_that_is_none_is_refused(value: Any) -> None:
    assert isinstance(receive(*frame_of(value, Kind.ERROR)), CodecError)


@SETTINGS
@given(st.binary(max_size=FRAME))
@example(b"mine")
@example(b"")
def test_random_bytes_are_refused(data: bytes) -> None:
    result = receive(data)
    assert isinstance(result, CodecError)


VALUES = [
    [1, "x"],
    [torch.arange(3.0), {"a": (1, 2.5), "b": {3, 4}}],
    [torch.arange(4000.0), ["x" * 2000]],
    [torch.arange(4000.0), [torch.ones(5000, dtype=torch.uint8)]],
    [b"x" * 3000, None],
    ["compute", "x" * 600, ["a", "b"]],
]
changes = st.lists(st.tuples(st.integers(0, FRAME + 300), st.binary(min_size=1, max_size=9)), min_size=1, max_size=3)


@SETTINGS
@given(st.sampled_from(VALUES), st.sampled_from([1, 1, 2]), changes, lengths | st.none(), st.integers(0, 40000))
def test_a_changed_frame_makes_values_or_an_error_and_nothing_else(
    value: Any,
    kind: int,
    changed: list[tuple[int, bytes]],
    numbers: tuple[int, int, int, int] | None,
    place: int,
) -> None:
    """Bytes of the header, the tree and the body are overwritten, and the lengths replaced."""
    data, body = map(bytearray, frame_of(value, kind))
    for at, new in changed:
        at = at % 160 if at % 3 else at  # most of a frame's meaning stands at its beginning
        data[at : at + len(new)] = new
        body[place : place + len(new)] = new[: max(0, len(body) - place)]
    if numbers is not None:
        RAW_LENGTHS.pack_into(data, LENGTHS_AT, *numbers)
    assert acceptable(receive(bytes(data), bytes(body)))


# On ranks


def hostile_main(rank: int, what: str) -> tuple[str, str]:
    """Main sends frames that its own code would never write; what each rank raises."""
    state = SharedState({"x": lambda ctx: 1})
    with SyncEngine(state, every=Every(steps=1), max_bytes=LIMIT) as engine:
        engine.start()
        if rank == 0:
            assert engine._run is not None
            frame = engine._run._opened.sides["world"].exchange.blocking._frame
            write = frame.write

            def corrupt(*args: Any) -> torch.Tensor | None:
                write(*args)
                raw = frame.buffer.numpy().data
                if what == "noise":
                    raw[:] = bytes(range(256)) * (len(raw) // 256)
                else:
                    RAW_LENGTHS.pack_into(raw, LENGTHS_AT, 1, 8, 1 << 40, 1 << 40)
                return None

            frame.write = corrupt  # type: ignore[assignment, method-assign]
        try:
            for step in range(1, 4):
                engine.step(step)
        except SyncStateError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("what", ["noise", "lengths"])
def test_a_receiver_of_bytes_that_are_no_frame_raises_and_main_hears_of_it(what: str) -> None:
    main, peer = returned(run_ranks(hostile_main, 2, what))
    assert (main[0], peer[0]) == ("CodecError", "CodecError")
    # Main reads back what it sends; in the noise it stumbles over the lengths, the other rank over the beginning.
    assert {"noise": "received a frame with impossible lengths", "lengths": "max_bytes=65536"}[what] in main[1]
    assert {"noise": "received ", "lengths": "max_bytes=65536"}[what] in peer[1]

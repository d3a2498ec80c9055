"""Every kind of value comes out of a sync on every rank as main computed it, bit for bit, and stays what it was."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from exact import identical, tensor_bits
from ranks import returned, run_ranks
from test_codec import DTYPES, INTS, VALUES, tensor_of

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import ComputeError

NEVER = Every(steps=1 << 40, start=1 << 40)  # only when sync() asks
MB = 1 << 20
CAPACITY = 1024 - 128  # bytes of payload in the smallest frame


class Sequence:
    """A source that returns one value after the other."""

    def __init__(self, values: Iterator[Any]) -> None:
        self.values = values

    def compute(self, ctx: Context) -> Any:
        return next(self.values)


def made_by(make: Callable[[], Any]) -> Callable[[Context], Any]:
    return lambda ctx: make()


def always(value: Any) -> Callable[[Context], Any]:
    return lambda ctx: value


def unlike(state: SharedState, values: dict[str, Callable[[], Any]]) -> list[str]:
    """Names whose value in the state is not exactly what its function makes."""
    return [name for name, make in values.items() if not identical(settled(state[name]), settled(make()))]


def settled(value: Any) -> Any:
    """A list without extended floats: of their 16 bytes 6 belong to no number, and are whatever was there before."""
    if type(value) is list:
        return [str(item) if isinstance(item, (np.longdouble, np.clongdouble)) else item for item in value]
    return value


# Every kind


def one_by_one(rank: int, frame_bytes: int) -> dict[str, Any]:
    state = SharedState()
    for name, make in VALUES.items():
        state.add(name, made_by(make), every=NEVER)
    with SyncEngine(state, frame_bytes=frame_bytes) as engine:
        engine.start()
        bodies = 0
        for name in VALUES:
            before = engine.stats.collectives
            engine.sync(name)
            bodies += engine.stats.collectives - before - 1
        return {"unlike": unlike(state, VALUES), "bodies": bodies > 0}


@pytest.mark.parametrize("frame_bytes", [1024, 1 << 20])
def test_every_kind_of_value_arrives_exactly_alone(frame_bytes: int) -> None:
    expected = {"unlike": [], "bodies": frame_bytes == 1024}
    assert returned(run_ranks(one_by_one, 2, frame_bytes)) == [expected] * 2


def all_together(rank: int, frame_bytes: int) -> list[str]:
    state = SharedState()
    for name, make in VALUES.items():
        state.add(name, made_by(make))
    with SyncEngine(state, frame_bytes=frame_bytes) as engine:
        engine.start()
        engine.step(100)
        return unlike(state, VALUES)


@pytest.mark.parametrize("frame_bytes", [1024, 1 << 23])
def test_every_kind_of_value_arrives_exactly_in_one_sync_with_all_others(frame_bytes: int) -> None:
    assert returned(run_ranks(all_together, 3, frame_bytes)) == [[], [], []]


SHAPES: dict[str, Callable[[], Any]] = {
    "one tensor": lambda: tensor_of(torch.float32, 3000),
    "one array": lambda: np.arange(3000.0),
    "one strided tensor": lambda: torch.arange(12_000.0).view(3000, 4)[:, 2],
    "several tensors": lambda: [tensor_of(torch.float64, 701), tensor_of(torch.uint8, 4099), np.arange(1234)],
    "tensors and a small tree": lambda: {"a": tensor_of(torch.int16, 2500), "b": ["x", 1.5], "c": torch.ones(3)},
    "a large tree alone": lambda: list(range(5000)),
    "a large tree beside tensors": lambda: [list(range(5000)), tensor_of(torch.bfloat16, 2501), "x" * 5000],
    "many small tensors": lambda: [torch.full((7,), float(i)) for i in range(500)],
    "nothing but text": lambda: "ä" * 4000,
}


def above_the_frame(rank: int) -> list[Any]:
    state = SharedState()
    for name, make in SHAPES.items():
        state.add(name, made_by(make), every=NEVER)
    with SyncEngine(state, frame_bytes=1024) as engine:
        engine.start()
        counts = []
        for name in SHAPES:
            before = engine.stats.collectives
            engine.sync(name)
            counts.append(engine.stats.collectives - before)
        engine.sync("one tensor", "a large tree alone")
        return [unlike(state, SHAPES), counts]


def test_a_value_above_the_frame_arrives_exactly_however_it_is_made() -> None:
    assert returned(run_ranks(above_the_frame, 2)) == [[[], [2] * len(SHAPES)]] * 2


def around_the_frame(rank: int) -> list[Any]:
    """Payloads that grow by single bytes past the frame's end, as text and as a tensor beside the tree."""
    texts = [b"x" * n for n in range(CAPACITY - 40, CAPACITY + 10)]
    tensors = [[tensor_of(torch.uint8, 4097), b"x" * n] for n in range(4224 - 200, 4224)]
    counts: list[list[int]] = []
    wrong = 0
    for values, frame_bytes in ((texts, 1024), (tensors, 128 + 4097 + 4224 + 63 & ~63)):
        state = SharedState()
        state.add("x", Sequence(iter(values)), every=NEVER)
        with SyncEngine(state, frame_bytes=frame_bytes) as engine:
            engine.start()
            counts.append([])
            for value in values:
                before = engine.stats.collectives
                engine.sync("x")
                counts[-1].append(engine.stats.collectives - before)
                wrong += not identical(state["x"], value)
    return [wrong, [[(n, len(list(group))) for n, group in itertools.groupby(c)] for c in counts]]


def test_the_second_collective_begins_with_the_first_byte_that_does_not_fit() -> None:
    main, peer = returned(run_ranks(around_the_frame, 2))
    assert main == peer
    wrong, (texts, tensors) = main
    assert wrong == 0
    # The tree of the list with one text: one byte for the list, three for the text's head.
    assert texts == [(1, 37), (2, 13)]
    assert [n for n, _ in tensors] == [1, 2]


# Dtypes are covered by VALUES; here they travel as main's own tensors, above and below the frame, with their strides.


def dtypes(rank: int) -> list[str]:
    shapes = [(), (0,), (5, 3), (41, 101)]
    values = {f"{dtype} {shape}": tensor_of(dtype, *shape) for dtype in DTYPES for shape in shapes}
    copied = [dtype for dtype in DTYPES if dtype is not torch.float4_e2m1fn_x2]  # which torch itself cannot transpose
    values |= {f"{dtype} transposed": tensor_of(dtype, 41, 101).t() for dtype in copied}
    state = SharedState()
    state.add("x", lambda ctx: values)
    with SyncEngine(state) as engine:
        engine.start()
    return [name for name, value in values.items() if not identical(state["x"][name], value)]


def test_every_dtype_arrives_with_its_shape_and_bits() -> None:
    assert returned(run_ranks(dtypes, 2)) == [[], []]


# What a rank holds is its own


def main_changes_its_source(rank: int) -> list[float]:
    """What is held after main has overwritten everything that it sent."""
    kept: list[Any] = [torch.zeros(4), torch.zeros(3000), np.zeros(4), np.zeros(3000)]
    state = SharedState()
    for i, value in enumerate(kept):
        state.add(str(i), always(value))
        state.add(f"nested {i}", always({"in": [value]}))
    with SyncEngine(state, frame_bytes=8192) as engine:
        engine.start()
        engine.sync("1")
        engine.sync("3")
        for value in kept:
            value += 1
        held = [state[str(i)] for i in range(4)] + [state[f"nested {i}"]["in"][0] for i in range(4)]
        return [float(abs(value).max()) for value in held]


def test_no_rank_holds_an_alias_of_what_main_computed() -> None:
    assert returned(run_ranks(main_changes_its_source, 2)) == [[0.0] * 8] * 2


def held_versions(rank: int, nbytes: int, form: str) -> list[Any]:
    """Refreshes a large value and keeps parts of old ones; returns what they hold in the end, and the buffers used."""
    count = nbytes // 4

    def compute(ctx: Context) -> Any:
        fresh = torch.full((count,), float(ctx.step))
        return {
            "tensor": fresh,
            "array": fresh.numpy(),
            "several": [fresh[: count // 2].clone(), fresh[count // 2 :].clone()],
        }[form]

    def part(value: Any, step: int) -> Any:
        """A piece of a version: the whole, a view, a view of a view; None for the versions that nobody keeps."""
        whole = value[step % 2] if form == "several" else value
        return {0: None, 1: whole, 2: whole[100:], 3: whole[5:900][::3]}[step % 4]

    state = SharedState()
    state.add("x", compute, every=Every(steps=1))
    kept: dict[int, Any] = {}
    with SyncEngine(state) as engine:
        for step in range(8):
            engine.step(step)
            kept[step] = part(state["x"], step)
        span = [(float(value.min()), float(value.max())) for value in kept.values() if value is not None]
        now = state["x"][0] if form == "several" else state["x"]
        return [span, float(now.min()), float(now.max())]


@pytest.mark.parametrize("form", ["tensor", "array", "several"])
def test_an_old_large_value_does_not_change_under_its_holder(form: str) -> None:
    expected = [[(float(s), float(s)) for s in (1, 2, 3, 5, 6, 7)], 7.0, 7.0]
    assert returned(run_ranks(held_versions, 2, 8 * MB, form)) == [expected] * 2


def addresses(rank: int) -> int:
    """How many buffers a large value goes through when nobody keeps old versions."""
    state = SharedState()
    state.add("x", lambda ctx: torch.full((MB,), float(ctx.step)), every=Every(steps=1))
    seen = set()
    with SyncEngine(state) as engine:
        for step in range(12):
            engine.step(step)
            seen.add(state["x"].data_ptr())
    return len(seen)


def test_a_large_value_that_nobody_keeps_alternates_between_two_buffers() -> None:
    assert returned(run_ranks(addresses, 2)) == [2, 2]


def sizes_in_turn(rank: int) -> list[list[tuple[int, float, float]]]:
    """Two large values of changing sizes, due together and apart, and what each version holds when all are over."""
    sizes = [2 * MB, MB, 2 * MB, 3 * MB, MB, MB]
    state = SharedState()
    for name in "ab":
        state.add(
            name,
            Sequence(iter([torch.full((n // 4,), float(i) + (name == "b") / 2) for i, n in enumerate(sizes)])),
            every=NEVER,
        )
    kept: list[Any] = []
    with SyncEngine(state) as engine:
        engine.start()
        for call in (("a", "b"), ("a",), ("b",), ("a", "b"), ("b",), ("a",), ("a", "b"), ("a",)):
            engine.sync(*call)
            kept.append([state["a"], state["b"]])
    return [[(len(value), float(value.min()), float(value.max())) for value in pair] for pair in kept]


def test_values_of_changing_sizes_do_not_disturb_each_other() -> None:
    main, peer = returned(run_ranks(sizes_in_turn, 2))
    assert main == peer
    counts = [2 * MB, MB, 2 * MB, 3 * MB, MB, MB]
    turns = [(0, 0), (1, 0), (1, 1), (2, 2), (2, 3), (3, 3), (4, 4), (5, 4)]
    assert main == [[(counts[a] // 4, float(a), float(a)), (counts[b] // 4, b + 0.5, b + 0.5)] for a, b in turns]


def small_versions(rank: int) -> bool:
    """Whether small values, which lie in the frame, stay as they were when later frames have come."""
    state = SharedState()
    state.add("x", lambda ctx: [torch.full((5,), ctx.step), np.full(5, ctx.step), tensor_of(torch.uint8, 5000)])
    kept = []
    with SyncEngine(state, every=Every(steps=1)) as engine:
        for step in range(5):
            engine.step(step)
            kept.append(state["x"])
    return all(
        torch.equal(a, torch.full((5,), i)) and (b == i).all() and torch.equal(c, tensor_of(torch.uint8, 5000))
        for i, (a, b, c) in enumerate(kept)
    )


def test_an_old_small_value_does_not_change_under_its_holder() -> None:
    assert returned(run_ranks(small_versions, 2)) == [True, True]


def random_value(rng: np.random.Generator, depth: int = 0) -> Any:
    """A list of tensors, arrays and numbers of shapes and types that change now and then."""
    kinds: list[Callable[[], Any]] = [
        lambda: torch.from_numpy(rng.integers(0, 256, int(rng.integers(0, 6)), np.uint8)),
        lambda: tensor_of(DTYPES[int(rng.integers(len(DTYPES)))], *rng.integers(0, 4, int(rng.integers(3))).tolist()),
        lambda: torch.tensor(rng.random()),
        lambda: torch.zeros(int(rng.integers(3)), 5),
        lambda: rng.random(3),
        lambda: float(rng.random()),
        lambda: torch.from_numpy(rng.random(700)),
    ]
    items = [kinds[int(rng.integers(len(kinds)))]() for _ in range(int(rng.integers(1, 12)))]
    return items if depth else {"a": items, "b": random_value(rng, 1)}


def changing_layouts(rank: int) -> list[int]:
    """Syncs whose values are laid out like the one before or otherwise; which versions are wrong in the end."""
    rng = np.random.default_rng(0)
    values: list[Any] = []
    while len(values) < 60:
        values += [random_value(rng)] * int(rng.integers(1, 4))  # the same layout again, with the same bits
        values.append(value_like(rng, values[-1]))
    state = SharedState()
    state.add("x", Sequence(iter(values)), every=Every(steps=1))
    held = []
    with SyncEngine(state, frame_bytes=4096) as engine:
        for step in range(len(values)):
            engine.step(step)
            held.append(state["x"])
    return [i for i, (a, b) in enumerate(zip(held, values, strict=True)) if not identical(a, b)]


def value_like(rng: np.random.Generator, value: Any) -> Any:
    """The same layout with other numbers."""
    if isinstance(value, dict):
        return {name: value_like(rng, item) for name, item in value.items()}
    if isinstance(value, list):
        return [value_like(rng, item) for item in value]
    return (
        value.flip(0)
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype in (*INTS[:5], torch.float64)
        else value
    )


def test_syncs_of_changing_layouts_bring_exact_values_that_stay_as_they_were() -> None:
    assert returned(run_ranks(changing_layouts, 2)) == [[], []]


def in_modes(rank: int) -> list[Any]:
    """Refreshes values of all sizes in turn inside and outside of modes that change how torch makes tensors."""

    def compute(ctx: Context) -> Any:
        with torch.inference_mode(False), torch.device("cpu"):
            return [torch.full((n,), float(ctx.step)) for n in (3, 5, 2000)]

    def large(ctx: Context) -> Any:
        with torch.inference_mode(False), torch.device("cpu"):
            return torch.full((MB,), float(ctx.step))

    state = SharedState()
    state.add("x", compute, every=Every(steps=1))
    state.add("large", large, every=Every(steps=1))
    state.add("alone", large, every=NEVER)
    found: list[Any] = []
    modes: list[Callable[[], Any]] = [
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.device("meta"),
        torch.no_grad,
    ]
    with SyncEngine(state) as engine:
        for step in range(9):
            with modes[step % 4]():
                engine.step(step)
                engine.sync("alone")
            weight = torch.ones(1, requires_grad=True)
            held = [*state["x"], state["large"], state["alone"]]
            (sum((weight * value).mean() for value in held)).backward()
            assert weight.grad is not None
            found.append(
                [float(weight.grad), {str(value.device) for value in held}, any(v.is_inference() for v in held)]
            )
    return found


def test_values_are_plain_tensors_on_the_cpu_whatever_mode_the_training_loop_is_in() -> None:
    assert returned(run_ranks(in_modes, 2)) == [[[5.0 * step, {"cpu"}, False] for step in range(9)]] * 2


def grown_from_previous(rank: int) -> list[Any]:
    """A source that returns what it gets as `previous`: as it is, a slice of it, and with something more."""

    def compute(ctx: Context) -> Any:
        if ctx.previous is None:
            return torch.arange(MB // 4)
        return {1: ctx.previous, 2: ctx.previous[1:], 3: torch.cat([ctx.previous, ctx.previous[:1]])}[ctx.step]

    state = SharedState()
    state.add("x", compute, every=Every(steps=1))
    held = []
    with SyncEngine(state) as engine:
        for step in range(4):
            engine.step(step)
            held.append(state["x"])
    return [tensor_bits(value) == tensor_bits(expected) for value, expected in zip(held, grown(), strict=True)]


def grown() -> list[torch.Tensor]:
    first = torch.arange(MB // 4)
    return [first, first, first[1:], torch.cat([first[1:], first[1:2]])]


def test_a_source_may_return_its_previous_value_or_parts_of_it() -> None:
    assert returned(run_ranks(grown_from_previous, 2)) == [[True] * 4] * 2


# Limits


def beyond_max_bytes(rank: int, max_bytes: int) -> list[Any]:
    state = SharedState()
    values = [torch.zeros(8192, dtype=torch.uint8), b"small", "x" * 9000, 7]
    state.add("x", Sequence(iter(values)), every=Every(steps=1))
    seen: list[Any] = []
    with SyncEngine(state, frame_bytes=1024, max_bytes=max_bytes) as engine:
        for step in range(4):
            try:
                engine.step(step)
            except ComputeError as error:
                seen.append(str(error).splitlines()[0])
            else:
                seen.append(state["x"])
    return seen


@pytest.mark.parametrize("max_bytes", [8192, 64])
def test_a_value_above_max_bytes_is_an_error_on_every_rank_and_the_next_one_arrives(max_bytes: int) -> None:
    main, peer = returned(run_ranks(beyond_max_bytes, 2, max_bytes))
    assert main == peer
    assert main[1::2] == [b"small", 7]
    for text in main[::2]:
        assert text.startswith("sync of 'x' at step ")
        assert f"more than max_bytes={max_bytes}" in text


class Special:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Special) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


def pickled(rank: int, allow: bool) -> Any:
    state = SharedState(allow_pickle=allow)
    state.add("x", lambda ctx: [Special(3), torch.ones(2)])
    state.add("y", lambda ctx: None, initial=Special(4) if allow else None)
    with SyncEngine(state) as engine:
        try:
            engine.start()
        except ComputeError as error:
            return str(error)
    return state["x"][0].number


def test_other_types_travel_by_pickle_where_it_is_asked_for_and_only_there() -> None:
    assert returned(run_ranks(pickled, 2, True)) == [3, 3]
    main, peer = returned(run_ranks(pickled, 2, False))
    assert main == peer
    assert main.startswith("value 'x' at step 0 on main (rank 0): CodecError: cannot encode [0] of type ")

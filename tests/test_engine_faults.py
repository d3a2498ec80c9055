"""What every rank sees when something goes wrong, and what works afterwards."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine, TensorSpec
from syncstate.errors import PeerError, SyncStateError

EACH = Every(steps=1)
NEVER = Every(steps=1 << 40, start=1 << 40)
# Longer than any of these runs may take: whoever waits for a timeout has hung.
PATIENCE = 300.0


class PickyError(RuntimeError):
    """Cannot be rebuilt from its args, as many real exceptions cannot."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def told(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def raised_by(call: Callable[[], object]) -> tuple[str, str]:
    """Class and text of the error of a call, which must raise one of the package's."""
    try:
        call()
    except SyncStateError as error:
        return told(error)
    return "nothing", ""


# A source fails


def sources_fail(rank: int) -> dict[str, Any]:
    def boom(ctx: Context) -> int:
        raise ValueError("boom")

    def picky(ctx: Context) -> int:
        raise PickyError(7, where="the source")

    def unprintable(ctx: Context) -> int:
        raise Unprintable

    def long(ctx: Context) -> int:
        raise ValueError("start " + "ä" * 100_000 + " end")

    def stops(ctx: Context) -> int:
        raise StopIteration

    state = SharedState()
    state.add("good", lambda ctx: ctx.step, every=EACH)
    for source in (boom, picky, unprintable, long, stops):
        state.add(source.__name__, source, every=NEVER)
    state.add("shape", lambda ctx: torch.zeros(3), every=NEVER, spec=TensorSpec((4,), torch.float32))
    state.add("type", lambda ctx: 1, every=NEVER, spec=float)
    state.add("object", lambda ctx: {"a": [1, object()]}, every=NEVER)
    state.add("function", lambda ctx: raised_by, every=NEVER)
    found: dict[str, Any] = {}
    with SyncEngine(state, timeout=PATIENCE) as engine:
        engine.start()
        calls: list[tuple[str, ...]] = [(name,) for name in state.names if name != "good"]
        calls += [("good", "boom", "picky"), ("object", "function", "good"), ("shape", "type"), ("boom", "type")]
        for step, names in enumerate(calls, 1):
            found[" ".join(names)] = raised_by(lambda names=names: engine.sync(*names))  # type: ignore[misc]
            assert engine.step(step) == ("good",)
            assert state["good"] == step
        found["ready"] = list(state)
        found["stats"] = [engine.stats.failed, engine.stats.syncs, engine.stats["boom"].failed]
    return found


@pytest.fixture(scope="module")
def failures() -> dict[str, tuple[str, str]]:
    """What a rank raised for each kind of failure, which is the same on all ranks."""
    main, *others = returned(run_ranks(sources_fail, 3))
    for name, (kind, text) in [item for item in main.items() if item[0] not in ("ready", "stats")]:
        for other in others:
            assert other[name][0] == kind
            if "[...]" not in other[name][1]:
                assert other[name][1] == text
    assert all(other["ready"] == main["ready"] and other["stats"] == main["stats"] for other in others)
    assert main["ready"] == ["good"]
    assert main["stats"] == [13, 27, 3]
    found: dict[str, tuple[str, str]] = others[0]
    return found


def test_every_rank_raises_with_value_step_rank_type_message_and_traceback(
    failures: dict[str, tuple[str, str]],
) -> None:
    kind, text = failures["boom"]
    assert kind == "ComputeError"
    first, second, *traceback = text.splitlines()
    assert first == "value 'boom' at step 0 on main (rank 0): ValueError: boom"
    assert second == "Traceback on rank 0:"
    assert traceback[0] == "Traceback (most recent call last):"
    assert "in boom" in text
    assert 'raise ValueError("boom")' in text
    assert traceback[-1] == "ValueError: boom"


def test_any_exception_arrives_as_text(failures: dict[str, tuple[str, str]]) -> None:
    for name, message in (
        ("picky", "PickyError: code 7 at the source"),
        ("stops", "StopIteration: "),
        ("unprintable", "Unprintable: "),
    ):
        kind, text = failures[name]
        assert kind == "ComputeError"
        assert text.splitlines()[0].startswith(f"value {name!r} at step ")
        assert f" on main (rank 0): {message}" in text


def test_a_text_that_does_not_fit_keeps_its_beginning_and_its_end(failures: dict[str, tuple[str, str]]) -> None:
    kind, text = failures["long"]
    assert kind == "ComputeError"
    assert text.startswith("value 'long' at step 3 on main (rank 0): ValueError: start ä")
    assert "\n[...]\n" in text
    assert text.endswith("ä end")
    assert 15_000 < len(text.encode()) < 16_384


def test_all_failures_of_a_sync_are_listed_and_none_of_its_values_comes(failures: dict[str, tuple[str, str]]) -> None:
    kind, text = failures["good boom picky"]
    assert kind == "ComputeError"
    lines = text.splitlines()
    assert lines[:3] == [
        "value 'boom' at step 9 on main (rank 0): ValueError: boom",
        "value 'picky' at step 9 on main (rank 0): PickyError: code 7 at the source",
        "Traceback on rank 0:",
    ]
    assert "ValueError: boom" in lines[3:]


def test_a_value_that_cannot_travel_is_a_compute_error_with_the_path_inside_it(
    failures: dict[str, tuple[str, str]],
) -> None:
    kind, text = failures["object"]
    assert kind == "ComputeError"
    assert text.startswith("value 'object' at step 7 on main (rank 0): CodecError: cannot encode a[1] of type object: ")
    kind, text = failures["object function good"]
    assert kind == "ComputeError"
    assert [line.split(": cannot encode ")[0] for line in text.splitlines()[:2]] == [
        "value 'function' at step 10 on main (rank 0): CodecError",
        "value 'object' at step 10 on main (rank 0): CodecError",
    ]


def test_a_value_that_breaks_its_spec_is_a_mismatch_with_both(failures: dict[str, tuple[str, str]]) -> None:
    assert failures["shape"] == (
        "MismatchError",
        "value 'shape' at step 5 on main (rank 0): promised tensor [4] torch.float32, got tensor [3] torch.float32",
    )
    assert failures["shape type"] == (
        "MismatchError",
        "value 'shape' at step 11 on main (rank 0): promised tensor [4] torch.float32, got tensor [3] torch.float32\n"
        "value 'type' at step 11 on main (rank 0): promised float, got int",
    )
    kind, text = failures["boom type"]
    assert kind == "ComputeError"
    assert text.splitlines()[1] == "value 'type' at step 12 on main (rank 0): promised float, got int"


# Plans


def different_plans(rank: int) -> dict[str, tuple[str, str]]:
    def texts(**engine: Any) -> tuple[str, str]:
        state = engine.pop("state", SharedState({"x": lambda ctx: 1}))
        return raised_by(lambda: SyncEngine(state, timeout=PATIENCE, **engine).start())

    def state_with(*names: str, **options: Any) -> SharedState:
        state = SharedState(allow_pickle=options.pop("allow_pickle", False))
        for name in names:
            state.add(name, lambda ctx: 1, **options)
        return state

    last = rank == 2
    return {
        "names": texts(state=state_with(*["x", "y"][: 1 + last], "z")),
        "schedule": texts(state=state_with("x", every=Every(steps=5 + last))),
        "engine's schedule": texts(every=Every(epochs=1 + last)),
        "spec": texts(state=state_with("x", spec=TensorSpec((3 + last,), torch.int64))),
        "initial": texts(state=state_with("x", initial=[0.0, -0.0][last])),
        "apply": texts(state=state_with("x", apply=(lambda value, ctx: None) if last else None)),
        "checkpoint": texts(state=state_with("x", checkpoint=not last)),
        "frame_bytes": texts(frame_bytes=2048 << last),
        "max_bytes": texts(max_bytes=1 << 20 + last),
        "seed": texts(seed=int(last)),
        "on_error": texts(on_error="keep" if last else "raise"),
        "allow_pickle": texts(state=state_with("x", allow_pickle=last)),
        "config": texts(config={"model": {"width": 3 + last, "depth": [1, 2, 3 + last]}, "lr": 0.1, "zz": last}),
        "config key": texts(config={"lr": 0.1, **({"extra": {}} if last else {})}),
        "nothing": texts(config={"lr": float("nan"), "empty": {}, "none": None}),
        # Equal sets that lie in memory in another order.
        "objects": texts(config={"function": lambda: 0, "object": [Unprintable() for _ in range(1 + 100 * last)][-1:]}),
        "sets": texts(config={"tags": {8, 0} if last else {0, 8}, "frozen": frozenset([8, 0] if last else [0, 8])}),
        "order": texts(config={"b": 1, "a": 2} if last else {"a": 2, "b": 1}),
    }


def test_differing_plans_name_the_keys_with_the_values_and_ranks_of_each_side() -> None:
    ranks = returned(run_ranks(different_plans, 3))
    head = "start: the plans of the ranks differ:\n  "
    expected = {
        "names": "values.y: missing on ranks 0-1; there on rank 2",
        "schedule": "values.x.every: 'every 5 steps' on ranks 0-1; 'every 6 steps' on rank 2",
        "engine's schedule": "values.x.every: 'every 1 epochs' on ranks 0-1; 'every 2 epochs' on rank 2",
        "spec": "values.x.spec: 'tensor [3] torch.int64' on ranks 0-1; 'tensor [4] torch.int64' on rank 2",
        "initial": "values.x.initial: '838a98054412' on ranks 0-1; 'dd20a8849467' on rank 2",  # digests of 0.0 and -0.0
        "apply": "values.x.apply: False on ranks 0-1; True on rank 2",
        "checkpoint": "values.x.checkpoint: True on ranks 0-1; False on rank 2",
        "frame_bytes": "engine.frame_bytes: 2048 on ranks 0-1; 4096 on rank 2",
        "max_bytes": "engine.max_bytes: 1048576 on ranks 0-1; 2097152 on rank 2",
        "seed": "engine.seed: 0 on ranks 0-1; 1 on rank 2",
        "on_error": "engine.on_error: 'raise' on ranks 0-1; 'keep' on rank 2",
        "allow_pickle": "engine.allow_pickle: False on ranks 0-1; True on rank 2",
        "config": (
            "config.model.depth.2: 3 on ranks 0-1; 4 on rank 2\n  "
            "config.model.width: 3 on ranks 0-1; 4 on rank 2\n  "
            "config.zz: False on ranks 0-1; True on rank 2"
        ),
        "config key": "config.extra: missing on ranks 0-1; {} on rank 2",
    }
    for found in ranks:
        assert found.pop("nothing") == ("nothing", "")
        assert found.pop("order") == ("nothing", "")
        assert found.pop("sets") == ("nothing", "")
        assert found.pop("objects") == ("nothing", "")
        assert found == {name: ("MismatchError", head + text) for name, text in expected.items()}


def tried_again(rank: int) -> list[Any]:
    state = SharedState()
    state.add("x", lambda ctx: ctx.step)
    if rank == 0:
        state.add("y", lambda ctx: 2)
    found: list[Any] = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for _ in range(2):
            found.append(raised_by(engine.start)[0])
        if rank == 1:
            state.add("y", lambda ctx: 3)
        found.append(engine.start(4))
        found.append(dict(state))
    return found


def test_after_plans_that_differed_start_can_be_tried_again() -> None:
    expected = ["MismatchError", "MismatchError", ("x", "y"), {"x": 4, "y": 2}]
    assert returned(run_ranks(tried_again, 2)) == [expected] * 2


# Steps apart


def apart(rank: int, call: str) -> list[Any]:
    state = SharedState({"a": lambda ctx: ctx.step, "b": lambda ctx: torch.zeros(5000)})
    found: list[Any] = []
    with SyncEngine(state, every=Every(steps=10), timeout=PATIENCE) as engine:
        engine.start()
        calls: list[Callable[[], object]] = {
            "steps": [lambda: engine.step(10 + 10 * rank), lambda: engine.step(30)],
            "epochs": [lambda: engine.step(10, rank), lambda: engine.step(20)],
            "values": [lambda: engine.sync("ab"[rank]), lambda: engine.sync("a")],
            "order": [lambda: rank and engine.sync("a"), lambda: engine.step(10), lambda: engine.step(20)],
        }[call]  # type: ignore[assignment]
        for one in calls:
            found.append(raised_by(one))
        # The engine has ended: every later call raises the same, and the default group still works.
        found.append([raised_by(lambda: engine.step(50)), raised_by(engine.sync), raised_by(lambda: engine.step(3))])
    one_more = torch.ones(1)
    dist.all_reduce(one_more)
    return [found, int(one_more)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("steps", "sync of 'a', 'b': rank 1 is at step 20 (epoch 0), main (rank 0) is at step 10 (epoch 0)"),
        ("epochs", "sync of 'a', 'b': rank 1 is at step 10 (epoch 1), main (rank 0) is at step 10 (epoch 0)"),
        ("values", "sync of 'b': main (rank 0) sends other values than rank 1 expects at step 0"),
        ("order", "sync of 'a': rank 1 is at step 0 (epoch 0), main (rank 0) is at step 10 (epoch 0)"),
    ],
)
def test_ranks_that_sync_at_different_points_raise_with_both(call: str, message: str) -> None:
    (main, default_main), (peer, default_peer) = returned(run_ranks(apart, 2, call))
    expected = (
        "MismatchError",
        f"{message}. Every rank must call the engine at the same steps and in the same order",
    )
    assert peer[0] == expected
    assert expected in main
    assert [*main[-1], *peer[-1]] == [expected] * 6
    assert (default_main, default_peer) == (2, 2)


# The training loop fails


def loop_fails(rank: int, failing: int, kind: str) -> list[Any]:
    """One rank leaves the block with an error of its own; what each rank's block raises, and what then works."""
    errors = {"error": RuntimeError("out of memory"), "interrupt": KeyboardInterrupt(), "exit": SystemExit(3)}
    state = SharedState({"x": lambda ctx: ctx.step, "y": lambda ctx: torch.zeros(5000)})
    found: list[Any] = []
    engine = SyncEngine(state, every=EACH, timeout=PATIENCE)
    try:
        with engine:
            engine.start()
            for step in range(1, 50):
                if step == 4 and rank == failing:
                    raise errors[kind]
                engine.step(step)
    except BaseException as error:
        found.append(told(error))
    try:
        engine.step(60)
    except Exception as error:
        found.append(told(error))
    engine.close()
    state.add("z", lambda ctx: 1)
    with SyncEngine(state, timeout=PATIENCE) as second:
        found.append(second.start(100))
    return found


@pytest.mark.parametrize(
    ("failing", "kind", "text"),
    [
        (1, "error", "RuntimeError: out of memory"),
        (0, "error", "RuntimeError: out of memory"),
        (2, "interrupt", "KeyboardInterrupt: "),
        (0, "exit", "SystemExit: 3"),
    ],
)
def test_an_error_in_the_training_loop_of_one_rank_reaches_all_others(failing: int, kind: str, text: str) -> None:
    outcomes = returned(run_ranks(loop_fails, 3, failing, kind))
    name, message = text.split(": ")
    for rank, (left, later, again) in enumerate(outcomes):
        if rank == failing:
            assert left == (name, message)
        else:
            assert left == ("PeerError", f"rank {failing} failed at step 3: {text}")
            assert later == left
        assert again == ("x", "y", "z")


def sinks_that_fail(rank: int) -> list[Any]:
    heard = []

    def sink(event: Any) -> None:
        heard.append(event["event"])
        if len(heard) == 2 and rank == 1:
            raise OSError("disk full")

    state = SharedState({"x": lambda ctx: ctx.step})
    with SyncEngine(state, every=EACH, timeout=PATIENCE, events=sink) as engine:
        for step in range(3):
            engine.step(step)
    return [heard, state["x"]]


def test_a_sink_that_fails_is_dropped_and_stops_no_rank() -> None:
    everything = ["open", "sync", "sync", "sync", "close"]
    assert returned(run_ranks(sinks_that_fail, 2)) == [[everything, 2], [["open", "sync"], 2]]


def all_fail(rank: int) -> list[Any]:
    state = SharedState({"x": lambda ctx: ctx.step})
    try:
        with SyncEngine(state, every=EACH, timeout=PATIENCE) as engine:
            engine.start()
            dist.barrier()
            raise ValueError(f"bad batch on rank {rank}")
    except (ValueError, PeerError) as error:
        return [told(error), None if error.__cause__ is None else told(error.__cause__)]


def test_where_all_ranks_fail_the_first_is_named_and_no_error_is_lost() -> None:
    outcomes = returned(run_ranks(all_fail, 3))
    (first,) = [rank for rank, (left, _) in enumerate(outcomes) if left[0] == "ValueError"]
    for rank, (left, cause) in enumerate(outcomes):
        own = ("ValueError", f"bad batch on rank {rank}")
        if rank == first:
            assert (left, cause) == (own, None)
        else:
            assert left == ("PeerError", f"rank {first} failed at step 0: ValueError: bad batch on rank {first}")
            assert cause == own


def aborted(rank: int) -> list[Any]:
    state = SharedState({"x": lambda ctx: ctx.step})
    with SyncEngine(state, every=EACH, timeout=PATIENCE) as engine:
        engine.start()
        dist.barrier()
        if rank == 1:
            engine.abort("the disk is full")
        first = raised_by(lambda: [engine.step(step) for step in range(1, 9)])
        return [first, raised_by(lambda: engine.step(10))]


def test_abort_ends_the_engine_on_all_ranks_with_its_reason() -> None:
    expected = ("PeerError", "rank 1 ended the engine at step 0: the disk is full")
    assert returned(run_ranks(aborted, 3)) == [[expected] * 2] * 3


def leaves_early(rank: int) -> tuple[str, str]:
    """Rank 1 has less data; the others want to sync once more."""
    state = SharedState({"x": lambda ctx: ctx.step, "y": lambda ctx: torch.zeros(5000)})
    with SyncEngine(state, every=EACH, timeout=PATIENCE) as engine:
        return raised_by(lambda: [engine.step(step) for step in range(6 if rank == 1 else 8)])


def test_a_rank_that_leaves_early_is_named_to_the_others_with_its_step() -> None:
    outcomes = returned(run_ranks(leaves_early, 3))
    assert outcomes[1] == ("nothing", "")
    for rank in (0, 2):
        kind, text = outcomes[rank]
        assert kind == "PeerError"
        assert "rank 1 ended at step 5" in text


# A source is interrupted


def interrupted(rank: int, kind: str) -> list[Any]:
    def source(ctx: Context) -> int:
        if ctx.step == 3:
            raise {"interrupt": KeyboardInterrupt("in the source"), "exit": SystemExit(3)}[kind]
        return ctx.step

    state = SharedState({"x": source})
    found: list[Any] = []
    with_block = SyncEngine(state, every=EACH, timeout=PATIENCE)
    try:
        with with_block as engine:
            for step in range(9):
                engine.step(step)
    except BaseException as error:
        found.append(told(error))
    found.append(state["x"])
    found.append(raised_by(lambda: with_block.step(4))[0])
    return found


@pytest.mark.parametrize(
    ("kind", "name", "message"), [("interrupt", "KeyboardInterrupt", "in the source"), ("exit", "SystemExit", "3")]
)
def test_an_interrupted_source_leaves_main_as_it_is_and_the_others_hear_of_it(
    kind: str, name: str, message: str
) -> None:
    main, *others = returned(run_ranks(interrupted, 3, kind))
    assert main == [(name, message), 2, "PeerError"]
    assert others == [[("PeerError", f"rank 0 failed at step 3: {name}: {message}"), 2, "PeerError"]] * 2


def interrupts_a_waiting_rank(rank: int) -> list[Any]:
    """Main's source sends Ctrl-C to rank 1, which waits for it, and goes on only when rank 1 has seen it."""
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    store.set(f"pid/{rank}", str(os.getpid()))

    def compute(ctx: Context) -> int:
        if ctx.step == 1:
            store.wait(["waiting"])
            os.kill(int(store.get("pid/1")), signal.SIGINT)
            store.wait(["interrupted"])
        return ctx.step

    state = SharedState({"x": compute})
    try:
        with SyncEngine(state, every=EACH, timeout=PATIENCE) as engine:
            engine.start()
            try:
                if rank == 1:
                    store.set("waiting", "yes")
                engine.step(1)
            except KeyboardInterrupt:
                store.set("interrupted", "yes")
                raise
            engine.step(2)
    except BaseException as error:
        return [*told(error)]
    return ["nothing"]


def test_ctrl_c_reaches_a_rank_that_waits_in_a_sync_and_through_it_the_others() -> None:
    main, peer, third = returned(run_ranks(interrupts_a_waiting_rank, 3, timeout=30.0))
    assert peer == ["KeyboardInterrupt", ""]
    assert main == third
    # Step 0 where the signal came just before the call.
    assert main in [["PeerError", f"rank 1 failed at step {step}: KeyboardInterrupt: "] for step in (0, 1)]


# A checkpoint cannot be put into force


class Unloadable:
    def compute(self, ctx: Context) -> int:
        return ctx.step

    def state_dict(self) -> dict[str, Any]:
        return {"key": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("momentum")


def cannot_load(rank: int) -> list[Any]:
    def engine() -> SyncEngine:
        return SyncEngine(SharedState({"x": Unloadable()}), timeout=PATIENCE)

    with engine() as first:
        first.start(3)
        content = first.state_dict()
    second = engine()
    second.load_state_dict(content)
    try:
        second.start(3)
        second.sync()  # the others hear of it at their next sync
    except Exception as error:
        return [*told(error)]
    return ["nothing"]


def test_a_source_that_cannot_load_its_state_ends_the_start_on_all_ranks() -> None:
    main, *others = returned(run_ranks(cannot_load, 3))
    assert main == ["KeyError", "'momentum'"]
    assert others == [["PeerError", "rank 0 failed at step 0: KeyError: 'momentum'"]] * 2


# Calls that would deadlock


def calls_from_inside(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    state = SharedState()
    engine = SyncEngine(state, every=EACH, timeout=PATIENCE)
    inner: dict[str, Callable[[], object]] = {
        "step": lambda: engine.step(100),
        "the same step": lambda: engine.step(0, 0),
        "start": lambda: engine.start(0),
        "sync": lambda: engine.sync("plain"),
        "close": engine.close,
        "abort": lambda: engine.abort("from inside"),
        "inspect": engine.inspect,
    }

    def compute(ctx: Context) -> int:
        for name, call in inner.items():
            found[f"compute: {name} at {ctx.step}"] = raised_by(call)[0]
        return ctx.step

    def apply(value: int, ctx: Context) -> None:
        for name, call in inner.items():
            found[f"apply: {name} at {ctx.step}"] = raised_by(call)[0]

    state.add("x", compute, apply=apply)
    state.add("plain", lambda ctx: ctx.step)
    with engine:
        for step in range(3):
            assert engine.step(step) == ("plain", "x")
        assert dict(state) == {"x": 2, "plain": 2}
    return found


def test_a_call_from_inside_a_source_or_apply_is_an_error_and_the_sync_goes_on() -> None:
    main, peer = returned(run_ranks(calls_from_inside, 2))
    assert len(main) == 2 * len(peer) == 42
    assert set(main.values()) | set(peer.values()) == {"ConfigError"}


def calls_from_a_thread(rank: int) -> list[Any]:
    state = SharedState({"x": lambda ctx: ctx.step})
    found: list[Any] = []
    with SyncEngine(state, every=Every(steps=2), timeout=PATIENCE) as engine:
        engine.start()
        calls: list[Callable[[], object]] = [
            lambda: engine.step(1),
            lambda: engine.step(2),
            lambda: engine.step(0),
            lambda: engine.sync(),
            lambda: engine.start(5),
            lambda: engine.inspect(),
            engine.close,
        ]
        for call in calls:
            thread = threading.Thread(target=lambda call=call: found.append(raised_by(call)))
            thread.start()
            thread.join()
            assert engine.step(0) == ()
        read: list[Any] = []
        thread = threading.Thread(target=lambda: read.append([state["x"], state.info("x").version]))
        thread.start()
        thread.join()
        assert read == [[0, 1]]
        assert engine.step(2) == ("x",)
    return found


def test_a_call_from_another_thread_is_an_error_and_reading_is_not() -> None:
    for found in returned(run_ranks(calls_from_a_thread, 2)):
        names = ("step", "step", "step", "sync", "start", "inspect", "close")
        assert found == [
            ("ConfigError", f"{name}: only the thread that started the engine may call it") for name in names
        ]


# Groups


def two_engines(rank: int) -> list[Any]:
    """Two engines whose lives overlap, with other schedules and other mains."""
    first, second = (SharedState({"x": lambda ctx, k=k: [k, ctx.step, ctx.rank]}) for k in (1, 2))
    found: list[Any] = []
    outer, inner = SyncEngine(first, every=Every(steps=2)), SyncEngine(second, every=Every(steps=3), main=1)
    with outer:
        outer.start()
        with inner:
            inner.start()
            for step in range(1, 7):
                found.append([outer.step(step), inner.step(step)])
            found.append([first["x"], second["x"]])
        found.append([outer.step(8), first["x"]])
    return found


def test_two_engines_live_in_one_process() -> None:
    x, no = ("x",), ()
    expected = [[no, no], [x, no], [no, x], [x, no], [no, no], [x, x]]
    expected_values = [[[1, 6, 0], [2, 6, 1]], [("x",), [1, 8, 0]]]
    assert returned(run_ranks(two_engines, 2)) == [[*expected, *expected_values]] * 2


def subgroups(rank: int) -> list[Any]:
    """Engines with the same names: on disjoint groups, on a part of the world, on a mesh, and on each rank alone."""
    lower, upper = dist.new_group([0, 1]), dist.new_group([2, 3])
    part = dist.new_group([1, 3])
    mine = lower if rank < 2 else upper
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def state() -> SharedState:
        return SharedState(
            {"x": lambda ctx: [rank, ctx.rank, ctx.world_size, ctx.step], "big": lambda ctx: [rank] * 9000}
        )

    def run(engine: SyncEngine) -> Any:
        with engine:
            for step in range(4):
                engine.step(step)
            assert engine.state["big"] == [engine.state["x"][0]] * 9000
            return engine.state["x"]

    found = [
        run(SyncEngine(state(), every=EACH, group=mine)),
        run(SyncEngine(state(), every=EACH, group=mine, main=1 if rank < 2 else 3)),
        run(SyncEngine(state(), every=EACH, group=part, main=3)) if rank in (1, 3) else None,
        run(SyncEngine(state(), every=EACH, group=mesh["a"])),
        run(SyncEngine(state(), every=EACH, group="single")),
        run(SyncEngine(state(), every=EACH, main=2)),
    ]
    outside = raised_by(lambda: SyncEngine(state(), group=upper if rank < 2 else lower).start())[0]
    main = raised_by(lambda: SyncEngine(state(), group=mine, main=2 if rank < 2 else 0).start())[0]
    two_dimensions = raised_by(lambda: SyncEngine(state(), group=mesh).start())[0]
    world = torch.ones(1)
    dist.all_reduce(world)
    return [found, [outside, main, two_dimensions], int(world)]


def test_engines_run_on_groups_meshes_and_single_processes_with_any_main() -> None:
    outcomes = returned(run_ranks(subgroups, 4))
    firsts = [0, 0, 2, 2]
    for rank, (found, refused, world) in enumerate(outcomes):
        assert found == [
            [firsts[rank], 0, 2, 3],
            [firsts[rank] + 1, 1, 2, 3],
            [3, 1, 2, 3] if rank in (1, 3) else None,
            [rank % 2, 0, 2, 3],
            [rank, 0, 1, 3],
            [2, 2, 4, 3],
        ]
        assert refused == ["ConfigError"] * 3
        assert world == 4


def without_a_process_group(rank: int) -> list[Any]:
    state = SharedState({"x": lambda ctx: rank})
    refused = raised_by(SyncEngine(state).start)
    with SyncEngine(state, group="single") as engine:
        engine.start()
    return [refused, state["x"]]


def test_a_world_without_a_process_group_is_refused_and_not_taken_for_groups_of_one() -> None:
    message = (
        "WORLD_SIZE is 2 but torch.distributed is not initialized: call torch.distributed.init_process_group first, "
        "or give group='single' to share nothing"
    )
    outcomes = returned(run_ranks(without_a_process_group, 2, init=False))
    assert outcomes == [[("ConfigError", message), 0], [("ConfigError", message), 1]]


# apply fails


def apply_fails(rank: int, failing: int, steps: int) -> list[Any]:
    def apply(value: int, ctx: Context) -> None:
        if rank == failing and value == 2:
            raise PickyError(5, where="apply")

    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=EACH, apply=apply)
    try:
        with SyncEngine(state, timeout=PATIENCE) as engine:
            for step in range(steps):
                engine.step(step)
    except Exception as error:
        return [told(error), getattr(error, "__notes__", [])]
    return ["nothing"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("steps", [3, 4, 9])
def test_an_apply_that_fails_on_one_rank_ends_the_engine_on_all_though_it_was_the_last_sync(
    failing: int, steps: int
) -> None:
    outcomes = returned(run_ranks(apply_fails, 3, failing, steps))
    for rank, (left, notes) in enumerate(outcomes):
        if rank == failing:
            assert left == ("PickyError", "code 5 at apply")
            assert notes == [f"syncstate: raised by apply of value 'x' at step 2 on rank {failing}"]
        else:
            kind, text = left
            assert kind == "PeerError"
            lines = text.splitlines()
            assert lines[0] == (f"apply of value 'x' failed at step 2 on rank {failing}: PickyError: code 5 at apply")
            assert lines[1] == f"Traceback on rank {failing}:"
            assert lines[-1].endswith("PickyError: code 5 at apply")

"""What goes wrong below the engine: the store does not answer, connections are not the group's own, ranks die early."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import PeerError, SyncStateError
from syncstate.topology import find_topology
from syncstate.wire import store
from syncstate.wire.channel import Channel
from syncstate.wire.connecting import connect
from syncstate.wire.lane import Lane
from syncstate.wire.meeting import Meeting
from syncstate.wire.rendezvous import meet
from syncstate.wire.sockets import Sockets

EACH = Every(steps=1)


def _engine(timeout: float = 60.0, **add: Any) -> SyncEngine:
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=EACH, **add)
    return SyncEngine(state, timeout=timeout)


def _told(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


# The store does not answer


def _host_dies_before_the_start(rank: int) -> Any:
    store._PATIENCE_SECONDS = 2.0
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)  # until it has gone
    try:
        _engine().start()
    except SyncStateError as error:
        return _told(error)
    return None


def test_a_store_that_died_before_the_start_ends_the_start() -> None:
    first, *others = run_ranks(_host_dies_before_the_start, 3, store="tcp", timeout=30.0)
    assert first.status == "died"
    for kind, text in returned(others):
        assert kind == "PeerError"
        assert text.startswith("start: seen from rank ")
        assert "the key-value store of the process group no longer answers" in text


def _stopped_host(rank: int, call: str) -> Any:
    """Rank 0 hosts the store and is stopped for good; what the others see who call the engine."""
    store._PATIENCE_SECONDS = 1.0
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    with _engine(timeout=3.0, apply=lambda value, ctx: None) as engine:
        engine.start()
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)
        try:
            if call == "abort":
                engine.abort("no reason")
            elif call == "leave":
                engine.leave(LookupError("no data"))
            elif call == "close":
                engine.close()
            else:
                engine.step(1)
        except SyncStateError as error:
            told: Any = _told(error)
        else:
            told = None
    os.kill(pids[0], signal.SIGKILL)  # so that the run is over
    return told


@pytest.mark.parametrize(
    ("call", "kind"), [("step", "SyncTimeout"), ("leave", "PeerError"), ("abort", None), ("close", "PeerError")]
)
def test_a_store_whose_host_is_stopped_blocks_no_call(call: str, kind: str | None) -> None:
    first, other = run_ranks(_stopped_host, 2, call, store="tcp", timeout=20.0)
    assert first.status == "died"
    (told,) = returned([other])
    if kind is None:
        assert told is None
    else:
        assert told[0] == kind
        assert "the key-value store of the process group no longer answers" in told[1]


def _interrupted_while_the_store_is_silent(rank: int) -> Any:
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    with pytest.raises(KeyboardInterrupt), _engine(timeout=60.0) as engine:  # noqa: PT012 - the block is what is left
        engine.start()
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        engine.step(1)
    os.kill(pids[0], signal.SIGKILL)
    return "interrupted"


def test_ctrl_c_ends_a_rank_whose_store_does_not_answer() -> None:
    first, other = run_ranks(_interrupted_while_the_store_is_silent, 2, store="tcp", timeout=20.0)
    assert first.status == "died"
    assert returned([other]) == ["interrupted"]


def _host_pauses(rank: int) -> Any:
    """Rank 0 hosts the store and is stopped for longer than a call may take, but not for longer than a sync may."""
    store._PATIENCE_SECONDS = 0.5
    with _engine(timeout=30.0) as engine:
        engine.start()
        dist.barrier()
        if rank == 0:
            if os.fork() == 0:
                time.sleep(1.5)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        engine.step(1)
        engine.step(2)
        return engine.state["x"]


def test_a_store_that_pauses_while_a_rank_waits_for_a_sync_is_not_given_up() -> None:
    assert returned(run_ranks(_host_pauses, 3, store="tcp", timeout=30.0)) == [2, 2, 2]


class Impatient(RuntimeError):
    pass


def _handler_raises(rank: int) -> Any:
    """A signal handler of the user raises a RuntimeError while this rank waits for the others to start."""

    def give_up(*_: Any) -> None:
        raise Impatient("enough")

    if rank == 1:
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        if rank == 0:
            time.sleep(1.0)
        with _engine() as engine:
            engine.start()
    except Exception as error:
        return _told(error)
    return None


def test_an_error_of_a_signal_handler_is_not_taken_for_one_of_the_store() -> None:
    other, mine = returned(run_ranks(_handler_raises, 2, timeout=30.0))
    assert mine == ("Impatient", "enough")
    assert other == ("PeerError", "start: rank 1 failed before it had started: Impatient: enough")


def _long_error(rank: int) -> Any:
    def apply(value: int, ctx: Context) -> None:
        if rank == 1 and ctx.step == 1:
            raise ValueError("start " + "\udcff\u00e4" * 2_000_000 + " end")

    try:
        with _engine(apply=apply) as engine:
            engine.start()
            engine.step(1)
            engine.step(2)
    except Exception as error:
        if rank != 1:
            return [type(error).__name__, len(str(error).encode()), str(error)[:90], str(error)[-60:]]
    return None


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_an_error_of_many_megabytes_reaches_the_others_cut_in_the_middle(kind: Any) -> None:
    first, _, third = returned(run_ranks(_long_error, 3, store=kind, timeout=60.0))
    assert first == third
    name, size, head, tail = first
    assert name == "PeerError"
    assert 60_000 < size <= 65536
    assert head.startswith(
        "apply of value 'x' failed at step 1 on rank 1: ValueError: start \\udcff\u00e4\\udcff\u00e4"
    )
    assert tail.endswith("\u00e4\\udcff\u00e4 end")


def _default_group_destroyed(rank: int) -> Any:
    """The host of the store destroys its default group, and the store with it, while the engine is open."""
    try:
        with _engine(apply=lambda value, ctx: None) as engine:
            engine.start()
            engine.step(1)
            dist.barrier()
            dist.destroy_process_group()
            time.sleep(0.2)
    except PeerError as error:
        return str(error)
    return None


def test_a_store_that_went_with_the_default_group_is_not_called_a_death() -> None:
    for text in returned(run_ranks(_default_group_destroyed, 3, store="tcp", timeout=30.0)):
        if text is not None:
            assert "has destroyed its default process group; this rank has destroyed its own: close the engine" in text


# Who is to blame


def _killed_at_the_last_sync(rank: int) -> Any:
    try:
        with _engine() as engine:
            engine.start()
            if rank == 2:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            if rank == 3:
                time.sleep(0.5)  # main and the rest have ended by now
            engine.step(1)
    except SyncStateError as error:
        return _told(error)
    return None


def test_a_rank_that_died_in_the_last_sync_is_named_although_others_have_ended() -> None:
    outcomes = run_ranks(_killed_at_the_last_sync, 4, timeout=30.0)
    assert outcomes.pop(2).status == "died"
    *others, below = returned(outcomes)
    assert below is not None
    for told in [below, *filter(None, others)]:
        assert told[0] == "PeerError"
        assert "rank 2 did not report" in told[1]
        assert "ended at step" not in told[1]


def _dies_in_the_last_body(rank: int, slow: int) -> Any:
    """Main dies in the body of the last sync: one rank has it all and has left, the slow one has half of it."""
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    state = SharedState()
    state.add("x", lambda ctx: torch.zeros(40_000_000, dtype=torch.int64) if ctx.step else None, every=EACH)
    broadcast, lane_class = Lane.broadcast, cast(Any, Lane)

    def late(lane: Lane, *args: Any) -> Any:
        body = any(isinstance(one, torch.Tensor) and one.numel() > 1 << 20 for one in args)
        if body:
            time.sleep(1.5)  # the other one has long left
        operation = broadcast(lane, *args)
        if body:
            time.sleep(0.02)
            os.kill(pids[0], signal.SIGKILL)
        return operation

    try:
        with SyncEngine(state, timeout=20.0) as engine:
            engine.start()
            if rank == slow:
                lane_class.broadcast = late
            engine.step(1)
    except SyncStateError as error:
        return _told(error)
    finally:
        lane_class.broadcast = broadcast
    return None


def test_a_death_in_the_last_body_is_seen_although_another_rank_has_left_with_all_of_it() -> None:
    first, left, slow = run_ranks(_dies_in_the_last_body, 3, 2, timeout=40.0)
    assert first.status == "died"
    assert returned([left]) == [None]
    ((kind, text),) = returned([slow])
    assert kind == "PeerError", text  # and not SyncTimeout, when the time was over
    assert "rank 0 did not report" in text


def _fails_to_connect(rank: int) -> Any:
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such-device"
    try:
        _engine().start()
    except SyncStateError as error:
        return _told(error)
    return None


def test_a_rank_that_cannot_connect_names_itself_and_not_others() -> None:
    for kind, text in returned(run_ranks(_fails_to_connect, 3, timeout=30.0)):
        assert kind == "PeerError"
        assert text.startswith("start: connecting the ranks at step 0: rank 1 could not connect (the backend says: ")


def _killed_while_connecting(rank: int, who: int, delay: float) -> Any:
    if rank == who:
        backend = dist.ProcessGroupGloo

        def make(*arguments: Any) -> Any:
            threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            return backend(*arguments)

        distributed: Any = dist
        distributed.ProcessGroupGloo = make
    try:
        _engine(timeout=2.0).start()
        time.sleep(1.0)
    except SyncStateError as error:
        return _told(error)
    return "started"


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.004])
def test_a_rank_that_dies_while_the_backend_connects_is_named(delay: float) -> None:
    outcomes = run_ranks(_killed_while_connecting, 4, 2, delay, timeout=30.0)
    assert outcomes.pop(2).status == "died"
    for told in returned(outcomes):
        if told != "started":
            assert told[0] in ("PeerError", "SyncTimeout")
            assert "rank 2 did not report" in told[1]


def _killed_while_comparing(rank: int, what: str) -> Any:
    """Rank 2 dies when it comes to a comparison through the store, which has no connections of its own."""
    if rank == 2:
        compare, meeting_class = Meeting.compare, cast(Any, Meeting)

        def killed(meeting: Meeting, about: str, *rest: Any) -> Any:
            if about.startswith(what):
                os.kill(os.getpid(), signal.SIGKILL)
            return compare(meeting, about, *rest)

        meeting_class.compare = killed
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=EACH)
    try:
        with SyncEngine(state, timeout=60.0, verify_values=True) as engine:
            engine.start()
            engine.step(1)
            engine.inspect()
    except SyncStateError as error:
        return _told(error)
    return None


@pytest.mark.parametrize("what", ["start: comparing checkpoints", "verify_values", "inspect"])
def test_a_rank_that_dies_before_a_comparison_is_seen_long_before_the_timeout(what: str) -> None:
    outcomes = run_ranks(_killed_while_comparing, 4, what, timeout=30.0)
    assert outcomes.pop(2).status == "died"
    for told in returned(outcomes):
        assert told[0] == "PeerError"
        assert "rank 2 did not report" in told[1]
        assert what in told[1]


@pytest.mark.parametrize("timeout", [1e10, 1e15, 1e300])
def test_a_timeout_of_many_years_is_no_error(timeout: float) -> None:
    assert returned(run_ranks(_with_timeout, 2, timeout, timeout=30.0)) == [1, 1]


def _with_timeout(rank: int, timeout: float) -> Any:
    with _engine(timeout=timeout, apply=lambda value, ctx: None) as engine:
        engine.start()
        engine.step(1)
        return engine.state["x"]


# Connections


def _strangers(rank: int, world_size: int) -> Any:
    """A thread connects to itself and across ranks while the group is made; whose connections are then known."""
    topology = find_topology(None)
    meeting = meet(topology, 20.0)
    with socket.create_server(("127.0.0.1", 0)) as server, Sockets(world_size - 1) as sockets:
        mine = [socket.create_connection(server.getsockname())]
        mine.append(server.accept()[0])
        group = connect(meeting, topology, 20.0, "lane")
    before = len(sockets._inodes)
    sockets.agree(meeting, "lane")
    known = set(sockets._inodes)
    strange = {one.fileno() for one in mine}
    inheritable = [os.get_inheritable(fd) for fd in known]
    dist.barrier()
    sockets.shut()
    for one in mine:
        one.send(b"works")
    heard = [one.recv(5) for one in mine]
    for one in mine:
        one.close()
    del group
    meeting.depart()
    return before, len(known), known & strange, any(inheritable), heard


def test_connections_of_a_thread_are_told_from_those_of_the_group() -> None:
    for found in returned(run_ranks(_strangers, 3, 3, timeout=30.0)):
        assert found == (0, 2, set(), False, [b"works", b"works"])


def _known(rank: int, world_size: int) -> Any:
    """How many connections a channel knows of each of its groups."""
    topology = find_topology(None)
    meeting = meet(topology, 20.0)
    meeting.compare("test", "")  # as engines do before they connect
    channel = Channel(topology, meeting, ("one", "two"))
    channel.connect(20.0)
    known = [len(lane.sockets._inodes) for lane in channel._lanes.values()]
    dist.barrier()
    channel.teardown(abrupt=False)
    return known


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_the_connections_of_every_group_are_known(kind: Any) -> None:
    assert returned(run_ranks(_known, 4, 4, store=kind, timeout=30.0)) == [[3, 3]] * 4


def _killed_with_children(rank: int, how: str) -> Any:
    """A rank dies while a program that it had started without closing its descriptors lives on."""
    with _engine() as engine:
        engine.start()
        if how == "system":
            os.system("sleep 20 &")
        else:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], close_fds=False)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for step in range(1, 9):
                engine.step(step)
                time.sleep(0.1)
        except PeerError as error:
            return str(error)
    return None


@pytest.mark.parametrize("how", ["system", "subprocess"])
def test_a_program_that_a_rank_started_does_not_hide_its_death(how: str) -> None:
    outcomes = run_ranks(_killed_with_children, 3, how, timeout=15.0)
    assert outcomes.pop(1).status == "died"
    for text in returned(outcomes):
        assert "rank 1 did not report" in text


def _known_beside_a_thread(rank: int, world_size: int) -> Any:
    """How many connections a channel knows of each of its groups, while a thread opens others all the time."""
    topology = find_topology(None)
    channel = Channel(topology, meet(topology, 20.0), ("one", "two"))
    stop, kept = threading.Event(), []

    def connect() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            while not stop.wait(0.001):
                kept.append(socket.create_connection(server.getsockname()))
                kept.append(server.accept()[0])

    thread = threading.Thread(target=connect)
    thread.start()
    channel.connect(20.0)
    stop.set()
    thread.join()
    known = [len(lane.sockets._inodes) for lane in channel._lanes.values()]
    strange = {one.fileno() for one in kept}
    mixed = [fd for lane in channel._lanes.values() for fd in lane.sockets._inodes if fd in strange]
    for one in kept:
        one.close()
    dist.barrier()
    channel.teardown(abrupt=False)
    return known, mixed, len(kept) > 0


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_connections_that_a_thread_opens_are_not_taken_for_those_of_a_group(kind: Any) -> None:
    assert returned(run_ranks(_known_beside_a_thread, 4, 4, store=kind, timeout=30.0)) == [([3, 3], [], True)] * 4


def _host_leaves_first(rank: int) -> str:
    """Rank 0 hosts the store, and its process is over when the others close."""
    with _engine(timeout=10.0, apply=lambda value, ctx: None) as engine:
        engine.start()
        engine.step(1)
        if rank:
            time.sleep(0.6)
    if rank == 0:
        os._exit(0)
    return "left"


def test_ranks_that_leave_after_the_host_of_the_store_see_no_error() -> None:
    _, *others = run_ranks(_host_leaves_first, 3, store="tcp", timeout=20.0)
    assert returned(others) == ["left", "left"]

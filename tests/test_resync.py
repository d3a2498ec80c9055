"""Replicas that have drifted apart: found to the bit, named, and made equal again without moving a tensor."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import tensor_bits
from expect import refuses
from ranks import returned, run_ranks
from torch import Tensor, nn

from syncstate import At, Every, Once
from syncstate.errors import DriftError, MismatchError
from syncstate.resync import DriftReport, ParameterResync, TensorDrift

EACH = Every(steps=1)
HEAD, VERDICT = 1024, 16  # bytes that a rank sends, and that come back


class Net(nn.Module):
    """A bit of everything: a frozen part, tied parts, buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(20, 30)
        self.norm = nn.BatchNorm1d(30)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.out = nn.Linear(30, 20)
        self.tied = nn.Linear(20, 30, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("hidden", torch.randn(3, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.linear(x)))
        return found


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor_bits(tensor) for name, tensor in tensors.items()}


def held(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def disturb(net: Net, rank: int) -> None:
    """Every rank but main differs, and no two alike."""
    if rank:
        with torch.no_grad():
            net.linear.weight[rank, 0] += rank
            net.frozen[1] -= 2 * rank
            net.norm.running_mean[3] = math.nan  # type: ignore[index]
            net.hidden[2, rank - 1] = 100.0  # type: ignore[operator]


# ---------------------------------------------------------------- modes


def resyncs(rank: int, mode: str, on_device: bool) -> dict[str, Any]:
    net = Net()
    before = bits(held(net))
    pointers = {name: tensor.data_ptr() for name, tensor in held(net).items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fired: list[Tensor] = []
    net.linear.weight.register_hook(fired.append)
    disturb(net, rank)
    with ParameterResync(net, every=EACH, mode=mode, timeout=30, bucket_bytes=512) as resync:
        resync._on_device = on_device
        first, second = resync.run(3), resync.run(4)
    moved = [name for name, tensor in held(net).items() if tensor.data_ptr() != pointers[name]]
    net(torch.randn(6, 20)).sum().backward()
    alike = [a is b for a, b in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True)]
    return {
        "first": first,
        "second": second,
        "moved": moved,
        "restored": bits(held(net))["frozen"] == before["frozen"],
        "alike": all(alike),
        "hooks": len(fired),
        "tied": net.tied.weight is net.linear.weight,
        "bits": bits({name: tensor for name, tensor in held(net).items() if "norm" not in name}),
        "leaf": net.linear.weight.is_leaf and net.linear.weight.requires_grad and not net.frozen.requires_grad,
    }


CASES = [(mode, on_device) for mode in ("repair", "copy") for on_device in (False, True)]


def resyncs_all(rank: int) -> list[Any]:
    return [resyncs(rank, mode, on_device) for mode, on_device in CASES]


@pytest.fixture(scope="module", params=[2, 4])
def resynced(request: pytest.FixtureRequest) -> list[Any]:
    return returned(run_ranks(resyncs_all, request.param))


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_replicas_end_equal_to_the_bit_in_the_tensors_that_they_had(resynced: list[Any], case: int) -> None:
    found, world_size = [results[case] for results in resynced], len(resynced)
    others = tuple(range(1, world_size))
    for result in found:
        assert result["bits"] == found[0]["bits"]
        assert result["restored"]
        assert result["alike"]
        assert result["tied"]
        assert result["leaf"]
        assert result["moved"] == []
        assert result["hooks"] == 1
        assert [(drift.name, drift.ranks) for drift in result["first"].drifted] == [
            ("frozen", others),
            ("hidden", others),
            ("linear.weight", others),
            ("norm.running_mean", others),
        ]
        largest = [drift.max_abs_diff for drift in result["first"].drifted]
        assert largest[0] == pytest.approx(2 * (world_size - 1))
        assert largest[3] == math.inf
        assert result["first"].step == 3
        assert result["second"].drifted == []
        assert result["first"] == found[0]["first"]
        assert result["second"] == found[0]["second"]


def checks(rank: int) -> Any:
    net = Net()
    disturb(net, rank)
    before = bits(held(net))
    with ParameterResync(net, every=EACH, mode="check", timeout=30) as resync:
        first, second = resync.run(1), resync.run(2)
    return bits(held(net)) == before, first.drifted, second.drifted


def test_a_check_reports_and_changes_nothing() -> None:
    for unchanged, first, second in returned(run_ranks(checks, 2)):
        assert unchanged
        assert [drift.name for drift in first] == ["frozen", "hidden", "linear.weight", "norm.running_mean"]
        assert first == second
        assert first[2][:2] == ("linear.weight", (1,))
        assert first[2].max_abs_diff == pytest.approx(1.0)


def says_nothing_of_equals(rank: int) -> Any:
    tensors = {f"part{i}": torch.full((66_406,), float(i)) for i in range(256)}
    tensors["part7"][5] = math.nan
    with ParameterResync(tensors, every=EACH, mode="check", timeout=30) as resync:
        equal = resync.run(0)
        if rank == 1:
            value = tensors["part200"][12_345]
            tensors["part200"][12_345] = torch.nextafter(value, torch.tensor(math.inf))
        return equal, resync.run(1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_ulp_in_68_megabytes_is_found_with_its_name_and_equal_ones_cost_little(world_size: int) -> None:
    for equal, report in returned(run_ranks(says_nothing_of_equals, world_size)):
        assert not equal
        assert equal.drifted == []
        assert equal.bytes_sent == (world_size - 1) * HEAD + VERDICT
        assert equal.bytes_sent < 64_000
        assert report
        ulp = 2.0**-16  # of a float32 between 128 and 256
        assert report.drifted == [TensorDrift("part200", (1,), ulp)]
        # That tensor, and besides a few digests.
        assert 66_406 * 4 <= report.bytes_sent < 66_406 * 4 + 64_000


def averages(rank: int, dtype: torch.dtype, on_device: bool) -> Any:
    world_size = dist.get_world_size()
    tensors: dict[str, Tensor] = {
        "even": torch.full((1000,), float(rank), dtype=dtype),
        "odd": torch.arange(35, dtype=torch.float32).mul(rank + 1).to(dtype).reshape(5, 7).t(),
        "count": torch.tensor(10 + rank),
        "mask": torch.tensor([rank == 0, True]),
        "complex": torch.full((3,), complex(rank, -rank), dtype=torch.complex64),
        "lazy": torch.full((1, 4), float(rank), dtype=dtype).expand(3, 4),
    }
    pointer = tensors["odd"].data_ptr()
    with ParameterResync(
        tensors, every=EACH, mode="average", on_drift="raise", bucket_bytes=256, timeout=30
    ) as resync:  # fmt: skip
        resync._on_device = on_device
        report = resync.run(0)
    mean = (world_size - 1) / 2
    assert tensors["odd"].data_ptr() == pointer
    assert tensors["odd"].dtype == dtype
    assert torch.equal(tensors["even"], torch.full((1000,), mean, dtype=dtype))
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7).t()
    total = sum((whole.mul(r + 1).to(dtype).float() for r in range(world_size)), torch.zeros(7, 5))
    assert torch.equal(tensors["odd"], (total / world_size).to(dtype))
    assert tensors["count"].item() == 10
    assert tensors["mask"].tolist() == [True, True]
    assert tensors["complex"].tolist() == [complex(mean, -mean)] * 3
    assert torch.equal(tensors["lazy"], torch.full((3, 4), mean, dtype=dtype))
    return report.drifted, bool(report), str(report).split(";", 1)[0]


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "as on an accelerator"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_an_average_is_the_mean_in_the_parameters_type_and_of_integers_mains(
    dtype: torch.dtype, on_device: bool
) -> None:
    for world_size in (2, 4):
        told = (f"resync (average) at step 0: 6 tensors averaged over {world_size} ranks",)
        assert returned(run_ranks(averages, world_size, dtype, on_device)) == [([], False, *told)] * world_size


def averages_many_small_numbers(rank: int) -> Any:
    # In bfloat16 256 + 1 is 256: a sum in the parameters' type would lose three of four ranks.
    tensors = {"x": torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)}
    with ParameterResync(tensors, every=EACH, mode="average", timeout=30) as resync:
        resync.run(0)
    return tensors["x"].item()


def test_an_average_of_short_floats_is_summed_in_float32() -> None:
    assert returned(run_ranks(averages_many_small_numbers, 4)) == [torch.tensor(259 / 4).bfloat16().item()] * 4


def averages_anything(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    tensors = {f"x{i}": torch.randn(701, generator=generator) for i in range(5)}
    with ParameterResync(tensors, every=EACH, mode="average", bucket_bytes=1000, timeout=30) as resync:
        resync.run(0)
    return bits(tensors)


def test_after_an_average_all_ranks_hold_the_same_bits() -> None:
    found = returned(run_ranks(averages_anything, 3))
    assert found[0] == found[1] == found[2]


# ---------------------------------------------------------------- majority


def votes(rank: int, odd: int, mode: str) -> Any:
    tensors = {"a": torch.zeros(10), "b": torch.ones(10), "c": torch.zeros(4)}
    if rank == odd:
        tensors["a"][3] = 5.0
    if rank == 1:
        tensors["b"][0] = -1.0
    tensors["c"][0] = rank  # all differ: nobody has a majority, main's counts
    with ParameterResync(tensors, every=EACH, mode=mode, source="majority", timeout=30) as resync:
        report = resync.run(0)
    return report.drifted, {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("odd", [0, 2])
def test_the_odd_one_out_is_repaired_from_the_others_also_when_it_is_main(odd: int) -> None:
    for drifted, tensors in returned(run_ranks(votes, 3, odd, "repair")):
        assert drifted == [
            TensorDrift("a", (odd,), 5.0),
            TensorDrift("b", (1,), 2.0),
            TensorDrift("c", (1, 2), 2.0),
        ]
        assert tensors == {"a": [0.0] * 10, "b": [1.0] * 10, "c": [0.0] * 4}


def ties(rank: int) -> Any:
    tensors = {"a": torch.tensor([float(rank in (1, 2))])}
    with ParameterResync(tensors, every=EACH, source="majority", timeout=30) as resync:
        return resync.run(0).drifted, tensors["a"].item()


def test_a_tie_goes_to_mains_side() -> None:
    assert returned(run_ranks(ties, 4)) == [([TensorDrift("a", (1, 2), 1.0)], 0.0)] * 4


def votes_in_two(rank: int) -> None:
    with refuses("resync: source='majority' needs at least 3 ranks, the group has 2"):
        ParameterResync({"a": torch.zeros(1)}, every=EACH, source="majority").run(0)


def test_a_majority_needs_three() -> None:
    returned(run_ranks(votes_in_two, 2))


# ---------------------------------------------------------------- on_drift


def reacts(rank: int, mode: str) -> Any:
    told: list[DriftReport] = []
    tensors = {"a": torch.full((3,), float(rank))}
    found: dict[str, Any] = {}
    with ParameterResync(tensors, every=EACH, mode=mode, on_drift="raise", timeout=30) as resync:
        with pytest.raises(DriftError) as caught:
            resync.run(5)
        found["text"], found["report"] = str(caught.value), vars(caught.value)["report"]
        found["then"] = tensors["a"].tolist()
        if mode == "repair":
            found["again"] = resync.run(6).drifted
    with ParameterResync(
        {"a": torch.full((3,), float(rank))}, every=EACH, mode=mode, on_drift=told.append, timeout=30
    ) as resync:  # fmt: skip
        assert told == []
        report = resync.run(5)
        assert told == [report]
    return found


@pytest.mark.parametrize(("mode", "then"), [("check", [1.0] * 3), ("repair", [0.0] * 3)])
def test_every_rank_raises_after_the_repair_or_calls_what_was_given(mode: str, then: list[float]) -> None:
    found = returned(run_ranks(reacts, 2, mode))
    done = {"check": "1 of 1 tensor differ", "repair": "1 of 1 tensor differed and are repaired"}[mode]
    for result in found:
        assert result["text"] == str(result["report"]) == str(found[0]["report"])
        assert result["text"].splitlines()[0].startswith(f"resync ({mode}) at step 5: {done}, on 2 ranks; ")
        assert result["text"].splitlines()[1:] == ["  name  ranks  largest difference", "  a     1      1"]
        assert result.get("again", []) == []
    assert found[0]["then"] == [0.0] * 3
    assert found[1]["then"] == then


# ---------------------------------------------------------------- wrappers, training


def trains(rank: int, broadcast_buffers: bool, compiled: bool) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    parts = net
    if compiled:
        net = torch.compile(net, backend="eager")
    ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=broadcast_buffers)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    reports = []
    with ParameterResync(ddp, every=Every(steps=2), mode="repair", timeout=30) as resync:
        for step in range(1, 7):
            optimizer.zero_grad(set_to_none=True)
            ddp(torch.randn(16, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            if step == 3 and rank == 1:
                with torch.no_grad():
                    weight = parts[0].weight
                    weight[2, 1] = torch.nextafter(weight[2, 1], torch.tensor(9.0))
            reports.append(resync.step(step))
    parameters = bits(dict(parts.named_parameters()))
    return [None if report is None else [d.name for d in report.drifted] for report in reports], parameters


WAYS = [(broadcast_buffers, compiled) for broadcast_buffers in (False, True) for compiled in (False, True)]


def trains_all(rank: int) -> list[Any]:
    return [trains(rank, *way) for way in WAYS]


@pytest.fixture(scope="module")
def trained() -> list[Any]:
    return returned(run_ranks(trains_all, 2))


@pytest.mark.parametrize("way", range(len(WAYS)), ids=map(str, WAYS))
def test_under_ddp_one_ulp_is_repaired_and_the_buffers_of_the_last_step_too(trained: list[Any], way: int) -> None:
    (first, ours), (second, theirs) = (results[way] for results in trained)
    buffers = ["1.running_mean", "1.running_var"]  # each rank has seen other batches
    assert first == second
    assert first[0] is None
    assert first[2] is None
    assert first[1] == buffers
    # The one ulp has passed through a step, so what it fed on has drifted as well.
    assert "0.weight" in first[3]
    assert set(buffers) <= set(first[3])
    assert first[5] == buffers
    assert ours == theirs


def trains_locally(rank: int) -> Any:
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    apart = []
    with ParameterResync(ddp, every=Every(steps=3), mode="average", timeout=30) as resync, ddp.no_sync():
        for step in range(1, 7):
            optimizer.zero_grad()
            ddp(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            resync.step(step)
            apart.append(ddp.module.weight.detach().clone())
    return [tensor_bits(weight) for weight in apart]


def test_local_steps_are_averaged_inside_no_sync() -> None:
    ours, theirs = returned(run_ranks(trains_locally, 2))
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [False, False, True, False, False, True]


# ---------------------------------------------------------------- when


def follows(rank: int, every: Any, calls: list[tuple[int, int | None]]) -> list[int]:
    due = []
    with ParameterResync({"a": torch.zeros(1)}, every=every, mode="check", timeout=30) as resync:
        for number, (step, epoch) in enumerate(calls):
            report = resync.step(step, epoch)
            if report is not None:
                assert report.step == step
                due.append(number)
    return due


@pytest.mark.parametrize(
    ("every", "calls", "due"),
    [
        (Every(steps=10), [(0, 0), (1, 0), (9, 0), (10, 0), (10, 0), (35, 1), (39, 1), (40, 1)], [0, 3, 5, 7]),
        (Every(steps=10), [(7, 0), (10, 0)], [1]),
        (Every(steps=10, start=10, stop=30), [(0, None), (10, None), (40, None), (50, None)], [1, 2]),
        (Every(epochs=2), [(0, 0), (5, 0), (5, 1), (9, 1), (9, 2), (9, 2), (12, None), (12, 4)], [0, 4, 7]),
        (At([3, 5]), [(0, 0), (4, 0), (5, 0), (6, 0)], [1, 2]),
        (Once(), [(0, 0), (1, 0), (100, 3)], [0]),
    ],
    ids=str,
)
def test_it_runs_where_a_point_was_crossed(every: Any, calls: Any, due: list[int]) -> None:
    assert returned(run_ranks(follows, 2, every, calls)) == [due, due]


def test_steps_never_go_back_and_only_an_engine_knows_the_time() -> None:
    resync = ParameterResync({"a": torch.zeros(1)}, every=EACH)
    resync.step(5, 1)
    with refuses("resync: step(4, 1): has already seen step 5 of epoch 1; steps and epochs never go back"):
        resync.step(4)
    with refuses("resync: step(6, 0): has already seen step 5 of epoch 1; steps and epochs never go back"):
        resync.step(6, 0)
    for every in (Every(seconds=3), Every(overhead=0.1)):
        with refuses(
            f"resync: {every} is decided by an engine's main process; give the resync to an engine or a host as "
            "resync=, or give Every(steps=...) or Every(epochs=...)"
        ):
            ParameterResync({"a": torch.zeros(1)}, every=every).step(0)


def test_one_process_compares_with_nobody() -> None:
    for mode in ("check", "repair", "copy", "average"):
        tensors = {"a": torch.tensor([1.0, math.nan])}
        with ParameterResync(tensors, every=EACH, mode=mode) as resync:
            report = resync.run(2)
        assert (report.step, report.drifted, report.bytes_sent, bool(report)) == (2, [], 0, False)
        assert str(report) == f"resync ({mode}) at step 2: 1 tensor " + (
            "averaged over 1 rank; 0 bytes sent" if mode == "average" else "equal on 1 rank; 0 bytes sent"
        )


# ---------------------------------------------------------------- structure


def differs(rank: int, mode: str, change: Callable[[dict[str, Tensor]], None]) -> Any:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    if rank == 1:
        change(tensors)
    with ParameterResync(tensors, every=EACH, mode=mode, timeout=30) as resync:
        with pytest.raises(MismatchError) as caught:
            resync.run(4)
        tensors = resync.module = {"a": torch.full((3,), float(rank))}
        return str(caught.value), len(resync.run(5).drifted)


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["c"] = tensors.pop("b")


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors["b"] = torch.zeros(4)


def retype(tensors: dict[str, Tensor]) -> None:
    tensors["b"] = torch.zeros(2, 2, dtype=torch.int32)


def tie(tensors: dict[str, Tensor]) -> None:
    tensors["b"] = tensors["a"]


def without_memory(tensors: dict[str, Tensor]) -> None:
    tensors["b"] = torch.zeros(2, 2, device="meta")


@pytest.mark.parametrize("mode", ["check", "repair", "copy", "average"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (rename, "tensors.b: 'float32 [2, 2] cpu' on rank 0; missing on rank 1"),
        (reshape, "tensors.b: 'float32 [2, 2] cpu' on rank 0; 'float32 [4] cpu' on rank 1"),
        (retype, "tensors.b: 'float32 [2, 2] cpu' on rank 0; 'int32 [2, 2] cpu' on rank 1"),
        (tie, "tensors.b: 'float32 [2, 2] cpu' on rank 0; missing on rank 1"),
        (without_memory, "tensors.b: 'float32 [2, 2] cpu' on rank 0; 'float32 [2, 2] meta' on rank 1"),
    ],
)
def test_another_structure_is_named_on_all_ranks_and_later_runs_work(mode: str, change: Any, line: str) -> None:
    (first, again), *others = returned(run_ranks(differs, 2, mode, change))
    assert others == [(first, again)]
    assert first.startswith("resync at step 4: the ranks differ:\n  ")
    assert first.splitlines()[1].strip() == line
    assert again == (mode != "average")


def runs_apart(rank: int) -> str:
    with ParameterResync({"a": torch.zeros(3)}, every=EACH, timeout=30) as resync:
        resync.run(0)
        with pytest.raises(MismatchError) as caught:
            resync.run(1 + rank)
    return str(caught.value)


def test_ranks_at_other_steps_say_so() -> None:
    first, second = returned(run_ranks(runs_apart, 2))
    assert first.splitlines()[1:] == second.splitlines()[1:]
    assert first.splitlines()[1] == "  step: 1 on rank 0; 2 on rank 1"


def plans_apart(rank: int) -> str:
    with pytest.raises(MismatchError) as caught:
        ParameterResync({"a": torch.zeros(3)}, every=Every(steps=1 + rank), timeout=30).run(0)
    return str(caught.value)


def test_ranks_with_other_plans_say_so() -> None:
    text = (
        "resync: the plans of the ranks differ:\n  resync.every: 'every 1 steps' on rank 0; 'every 2 steps' on rank 1"
    )
    assert returned(run_ranks(plans_apart, 2)) == [text, text]

"""What optimizers hold is compared and repaired too: in place, and without making a step for it."""

from typing import Any

import pytest
import torch
from exact import tensor_bits
from expect import refuses
from ranks import returned, run_ranks
from torch import nn

from syncstate import Every
from syncstate.errors import MismatchError
from syncstate.resync import ParameterResync, TensorDrift

EACH = Every(steps=1)

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam, lr is a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False, capturable=False),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: Any, seed: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def content(optimizer: Any) -> Any:
    """Everything that it holds, as something to compare."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), tensor_bits(value)
        if isinstance(value, (list, tuple)):
            return type(value).__name__, [plain(part) for part in value]
        return type(value).__name__, repr(value)

    state = [{k: plain(v) for k, v in optimizer.state.get(p, {}).items()} for p in optimizer.param_groups[0]["params"]]
    groups = [{k: plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return state, groups


STEPPED = {"both": (True, True), "main": (True, False), "other": (False, True)}


def resyncs(rank: int, kind: str, stepped: tuple[bool, bool], mode: str) -> Any:
    module = net()
    optimizer = OPTIMIZERS[kind](module.parameters())
    if stepped[rank]:
        train(module, optimizer, seed=rank)
    held = {
        (p, k): v.data_ptr() for p, s in optimizer.state.items() for k, v in s.items() if isinstance(v, torch.Tensor)
    }
    references = [id(p) for p in optimizer.param_groups[0]["params"]]
    with ParameterResync(module, every=EACH, mode=mode, optimizer=optimizer, timeout=30) as resync:
        first, second = resync.run(0), resync.run(1)
    kept = {optimizer.state[p][k].data_ptr() == pointer for (p, k), pointer in held.items() if k in optimizer.state[p]}
    assert kept <= {True}
    assert references == [id(p) for p in optimizer.param_groups[0]["params"]]
    after = content(optimizer)
    train(module, optimizer, seed=5)
    weights = [tensor_bits(p) for p in module.parameters()]
    return first.drifted, second.drifted, after, weights


def resyncs_all(rank: int) -> Any:
    cases = [(k, s, m) for k in OPTIMIZERS for s in STEPPED for m in ("repair", "copy")]
    return {case: resyncs(rank, case[0], STEPPED[case[1]], case[2]) for case in cases}


@pytest.fixture(scope="module")
def resynced() -> list[dict[tuple[str, str, str], Any]]:
    """What each rank found in each case; one run, because the first optimizer of a process is slow to make."""
    return returned(run_ranks(resyncs_all, 2))


@pytest.mark.parametrize("mode", ["repair", "copy"])
@pytest.mark.parametrize("stepped", STEPPED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_ends_with_mains_state_whoever_had_any(resynced: Any, kind: str, stepped: str, mode: str) -> None:
    ours, theirs = (found[kind, stepped, mode] for found in resynced)
    first, second, _, _ = ours
    assert ours == theirs
    assert second == []
    assert all(drift.ranks == (1,) for drift in first)
    names = {drift.name for drift in first}
    assert "0.weight" in names
    if kind.startswith("adam"):
        assert "optimizer.state.0.weight.exp_avg" in names


def looks(rank: int) -> Any:
    module = net()
    optimizer = torch.optim.Adam(module.parameters())
    if rank == 0:
        train(module, optimizer, seed=0)
    with ParameterResync(module, every=EACH, mode="check", optimizer=optimizer, timeout=30) as resync:
        before = content(optimizer)
        report = resync.run(0)
        assert content(optimizer) == before
    assert len(optimizer.state) == (4 if rank == 0 else 0)
    return [drift for drift in report.drifted if drift.name.startswith("optimizer.state.1.bias")]


def test_a_check_creates_nothing() -> None:
    inf = float("inf")
    want = [TensorDrift(f"optimizer.state.1.bias.{key}", (1,), inf) for key in ("exp_avg", "exp_avg_sq", "step")]
    assert returned(run_ranks(looks, 2)) == [want, want]


def groups_apart(rank: int) -> Any:
    module = net()
    groups = [{"params": [p], "lr": 0.1 * (number + 1)} for number, p in enumerate(module.parameters())]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if rank == 1:
        optimizer.param_groups[1]["lr"] = 0.5
        optimizer.param_groups[2]["nesterov"] = True
    else:
        optimizer.param_groups[3]["initial_lr"] = 0.25
    with ParameterResync(module, every=EACH, optimizer=optimizer, timeout=30) as resync:
        report = resync.run(0)
        assert not resync.run(1)
    assert len(optimizer.state) == 0
    return report.drifted, content(optimizer)


def test_plain_numbers_of_the_groups_are_values() -> None:
    (drifted, ours), (again, theirs) = returned(run_ranks(groups_apart, 2))
    assert drifted == again
    assert ours == theirs
    assert drifted == [
        TensorDrift("optimizer.param_groups.1.lr", (1,), 0.5 - 0.2),
        TensorDrift("optimizer.param_groups.2.nesterov", (1,), float("inf")),
        TensorDrift("optimizer.param_groups.3.initial_lr", (1,), float("inf")),
    ]


def leaves_out(rank: int) -> Any:
    module = net()
    first = torch.optim.Adam([module[0].weight, module[0].bias])  # type: ignore[index]
    second = torch.optim.SGD(module[1].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
    train(module, first, seed=rank)
    train(module, second, seed=rank)
    second.param_groups[0]["hook"] = leaves_out  # cannot be compared
    exclude = ["0.bias", "optimizer.*.hook", "optimizer.1.state.*"]
    with ParameterResync(
        module, every=EACH, mode="check", optimizer=[first, second], exclude=exclude, timeout=30
    ) as resync:  # fmt: skip
        return [drift.name for drift in resync.run(0).drifted]


def test_a_parameter_that_is_left_out_takes_its_state_along_and_patterns_reach_the_optimizers() -> None:
    want = ["0.weight", "1.bias", "1.weight"]
    want += [f"optimizer.0.state.0.weight.{key}" for key in ("exp_avg", "exp_avg_sq")]
    assert returned(run_ranks(leaves_out, 2)) == [want, want]


def test_a_value_that_cannot_travel_is_refused_by_name() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    resync = ParameterResync(module, every=EACH, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"^resync: 'optimizer.param_groups.0.hook' cannot be compared: .*exclude$"):
        resync.run(0)


def builds_other_groups(rank: int) -> str:
    module = net()
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters[: 4 - rank], lr=0.1)
    with pytest.raises(MismatchError) as caught:
        ParameterResync(module, every=EACH, optimizer=optimizer, timeout=30).run(0)
    return str(caught.value)


def test_optimizers_of_other_parameters_are_a_mismatch() -> None:
    first, second = returned(run_ranks(builds_other_groups, 2))
    assert first == second
    line = first.splitlines()[1].strip()
    assert line.startswith("tensors.optimizer.param_groups.0.params: '4 parameters (")
    assert "'3 parameters (" in line
    assert line.endswith("on rank 1")


def averages(rank: int) -> Any:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 + rank, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(rank))
        if rank == 0:
            optimizer.state[parameter]["more"] = torch.full((3,), 7.0)
    with ParameterResync(module, every=EACH, mode="average", optimizer=optimizer, timeout=30) as resync:
        resync.run(0)
    state = optimizer.state[module[0].bias]  # type: ignore[index]
    return state["momentum_buffer"].tolist(), state["more"].tolist(), optimizer.param_groups[0]["lr"]


def test_an_average_takes_the_mean_of_state_that_all_have_and_mains_of_the_rest() -> None:
    assert returned(run_ranks(averages, 2)) == [([0.5] * 4, [7.0] * 3, 0.1)] * 2


def shards(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(net().parameters(), torch.optim.SGD, lr=0.1)
    with refuses(
        "resync: a ZeroRedundancyOptimizer shards its state over the ranks, so there is nothing to compare; leave out "
        "optimizer="
    ):
        ParameterResync(net(), every=EACH, optimizer=optimizer)


def test_an_optimizer_that_shards_its_state_is_refused() -> None:
    returned(run_ranks(shards, 2))

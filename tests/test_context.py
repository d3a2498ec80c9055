"""What a source is told, and the random numbers that belong to one version of one value."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from syncstate import Context
from syncstate.context import generator


def draws(seed: int, name: str, version: int, count: int = 4) -> list[int]:
    return [int(number) for number in generator(seed, name, version).integers(1 << 63, size=count)]


def test_every_field_has_a_default() -> None:
    ctx = Context()
    assert (ctx.step, ctx.epoch, ctx.rank, ctx.world_size, ctx.is_main) == (0, 0, 0, 1, True)
    assert (ctx.local_rank, ctx.node_rank, ctx.num_nodes) == (0, 0, 1)
    assert (ctx.collected, ctx.previous, ctx.model, ctx.host) == (None, None, None, None)
    assert isinstance(ctx.rng, np.random.Generator)


def test_a_source_is_tested_without_an_engine() -> None:
    def hardest(ctx: Context) -> float:
        return float(ctx.step + max(max(losses) for losses in ctx.collected))

    assert hardest(Context(step=10, collected=[[1.0], [3.0, 2.0]])) == 13.0


def test_a_context_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Context().step = 1  # type: ignore[misc]


def test_the_same_seed_name_and_version_draw_the_same() -> None:
    assert draws(7, "seed", 3) == draws(7, "seed", 3)


def test_another_seed_name_or_version_draws_something_else() -> None:
    base = draws(7, "seed", 3)
    for other in (draws(8, "seed", 3), draws(7, "sped", 3), draws(7, "seed", 4)):
        assert not set(other) & set(base)


def test_the_name_and_the_seed_do_not_run_into_each_other() -> None:
    assert draws(1, "1/x", 1) != draws(11, "/x", 1)
    assert draws(1, "1", 1) != draws(11, "", 1)


def test_the_numbers_of_a_version_do_not_overlap_with_those_of_the_next() -> None:
    # Philox counts up from the version's own block; a thousand numbers stay far from the next block.
    assert not set(draws(0, "x", 1, 1000)) & set(draws(0, "x", 2, 1000))


def test_the_stream_stays_what_it_is() -> None:
    # A resumed run relies on it: whoever changes how seed, name and version become numbers must see it here.
    bits = generator(0, "x", 1).bit_generator
    assert isinstance(bits, np.random.Philox)
    assert bits.random_raw(2).tolist() == [3112477792308186568, 17371768977848170991]


def test_large_negative_and_unicode_seeds_and_names_work() -> None:
    assert draws(2**64 - 1, "ü\ud800", 1) != draws(-1, "ü\ud800", 1)


def test_drawing_touches_no_global_generator() -> None:
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    Context(step=1).rng.random(100)
    draws(0, "x", 1)
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


FIELDS: dict[str, Any] = {
    "step": 5, "epoch": 1, "rank": 0, "world_size": 2, "local_rank": 0, "node_rank": 0, "num_nodes": 1,
    "is_main": True, "collected": None, "model": None, "host": None,
}  # fmt: skip


def test_the_engines_context_draws_what_the_generator_of_its_version_draws() -> None:
    ctx = Context.of(dict(FIELDS), 0.5, seed=7, name="seed", version=3)
    assert (ctx.step, ctx.world_size, ctx.previous) == (5, 2, 0.5)
    assert ctx.rng.integers(1 << 63, size=4).tolist() == draws(7, "seed", 3)
    assert ctx.rng is ctx.rng


def test_contexts_of_one_sync_do_not_share_their_fields() -> None:
    fields = dict(FIELDS)
    one = Context.of(fields, "a", 0, "one", 1)
    two = Context.of(fields, "b", 0, "two", 1)
    assert (one.previous, two.previous) == ("a", "b")
    assert one.rng.random() != two.rng.random()
    assert "rng" not in fields


def test_the_engines_context_is_a_context_in_every_respect() -> None:
    ctx = Context.of(dict(FIELDS), None, 0, "x", 1)
    assert isinstance(ctx, Context)
    assert {f.name for f in dataclasses.fields(Context)} <= {*vars(ctx), "rng"}
    assert dataclasses.replace(ctx, step=9).step == 9
    assert "step=5" in repr(ctx)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ctx.step = 1  # type: ignore[misc]
    with pytest.raises(AttributeError, match="loss"):
        ctx.loss  # noqa: B018

"""What a source is told: the step, the place among the ranks, and random numbers of its own."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from syncstate.digest import digest_text

__all__ = ["Context", "generator"]


def generator(seed: int, name: str, version: int) -> np.random.Generator:
    """The random numbers of one computation of one value.

    Counter-based (Philox 4x64, Salmon et al. 2011: "Parallel random numbers: as easy as 1, 2, 3"): the key is made of
    the seed and the name, the counter is the version. Nothing has to be saved, and a resumed run draws the same.

    Args:
        seed: The engine's seed.
        name: The value's name.
        version: The version that is being computed; the first is 1.
    """
    key = np.frombuffer(digest_text(f"{seed}/{name}"), dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, version]))


_new = object.__new__
_UNCHANGEABLE = {type(None), bool, int, float, complex, str, bytes}


@dataclass(frozen=True)
class Context:
    """What a source is told. Every field has a default, so a source is tested by `source(Context(step=10))`.

    Attributes:
        step: Optimizer steps finished so far.
        epoch: Epochs begun so far, the first is 0.
        rank: This process in the engine's group.
        world_size: Number of processes in the group.
        local_rank, node_rank, num_nodes: Place on the node and of the node.
        is_main: Whether this process is the main process; always true where a source computes.
        rng: A `numpy.random.Generator` of this value and version: the same on resume, no global state touched.
        collected: What the ranks collected, in rank order or reduced; None without `collect`.
        previous: The last computed value, None before the first; a copy, so that changing it changes nothing else.
        model: The unwrapped model of the host, None in a plain loop.
        host: The Trainer or the Accelerator, None in a plain loop.
    """

    step: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    is_main: bool = True
    rng: np.random.Generator = field(default_factory=lambda: generator(0, "", 0))
    collected: Any = None
    previous: Any = field(default_factory=lambda: None)  # no attribute of the class, so that `of` can leave it out
    model: Any = None
    host: Any = None

    @classmethod
    def of(cls, shared: dict[str, Any], previous: Any, seed: int, name: str, version: int) -> "Context":
        """A context for one computation, made without the generator that most sources never ask for.

        Args:
            shared: The fields that all values of a sync have in common.
            previous: The last computed value.
            seed, name, version: What `rng` is made of, when it is first read.
        """
        # The constructor of a frozen dataclass costs a microsecond, which a sync of 20 values would pay 20 times.
        context = _new(cls)
        fields = context.__dict__
        fields.update(shared)
        if type(previous) in _UNCHANGEABLE:
            fields["previous"] = previous
        else:
            fields["_previous"] = previous
        fields["_draw"] = (seed, name, version)
        return context

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not set yet: in a context made by `of`, what costs time to make.
        if name == "rng" and "_draw" in self.__dict__:
            rng = self.__dict__["rng"] = generator(*self.__dict__["_draw"])
            return rng
        if name == "previous" and "_previous" in self.__dict__:
            previous = self.__dict__["previous"] = copy.deepcopy(self.__dict__["_previous"])
            return previous
        raise AttributeError(name)

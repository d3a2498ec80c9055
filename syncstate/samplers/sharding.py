"""What Lightning does to a batch sampler where it wants each rank to have a part of the data.

It makes the batch sampler anew, from the arguments that it was made from, around a sampler of its own. That would drop
the order that the user asked for, and leave the user with an object whose state nobody looks at any more. So the class
here answers with itself if it is sharded already, and with an error if not.
"""

from typing import Any, TypeVar

from torch.utils.data import DistributedSampler

from syncstate.errors import ConfigError

__all__ = ["check_sharded", "stays_itself"]

C = TypeVar("C", bound=type)


def stays_itself(cls: C) -> C:
    """Give a batch sampler the marks that Lightning looks for, and a `sampler` for it to put its own in place of.

    Set from outside, because the body of a class would change names with two underscores. The constructor is then
    called with the object itself as its first argument.
    """
    marks = {
        "__pl_saved_args": lambda self: (self, self.state, self.names),
        "__pl_saved_kwargs": lambda self: {},
        "__pl_saved_default_kwargs": lambda self: {"sampler": None},
        "__pl_saved_arg_names": lambda self: ("batch_sampler", "state", "names"),
    }
    for name, read in marks.items():
        setattr(cls, name, property(read))
    return cls


def check_sharded(batch_sampler: Any, wanted: Any) -> None:
    """Check that a batch sampler deals each rank its own part already.

    Args:
        batch_sampler: The one inside of the stamping one.
        wanted: The sampler that Lightning would put there.

    Raises:
        ConfigError: It does not, and there are several ranks.
    """
    if not isinstance(wanted, DistributedSampler) or wanted.num_replicas == 1:
        return
    inner = getattr(batch_sampler, "sampler", None)
    if all(getattr(each, "num_replicas", 1) == 1 for each in (batch_sampler, inner)):
        raise ConfigError(
            f"SharedBatchSampler: {wanted.num_replicas} ranks would each train on all batches of this "
            f"{type(batch_sampler).__name__}: make it with a SharedIndexSampler or a DistributedSampler. If it deals "
            "each rank a part of its own in another way, use Trainer(use_distributed_sampler=False)"
        )

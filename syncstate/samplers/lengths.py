"""The length of an epoch, where a host asks for it once and a shared list changes it."""

from typing import Any

from syncstate.errors import ConfigError
from syncstate.samplers.indices import SharedIndexSampler

__all__ = ["check_kept_length"]


def check_kept_length(loader: Any, kept: float, limit: float = 1.0) -> None:
    """Check that the length a host goes by is still that of the loader; for hosts, before they iterate it.

    Lightning asks when training begins. Of an epoch that has become longer it would leave out the end, and it would
    never reach the validation after one that has become shorter; both without a word.

    Args:
        loader: A `DataLoader`; only one over a `SharedIndexSampler` without `num_samples` is looked at.
        kept: How many batches a rank the host counts on.
        limit: The most batches of an epoch, or with a `float` their share, that the host was told to use.

    Raises:
        ConfigError: The loader has another number of batches now; names both.
    """
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [each for each in (getattr(loader, "sampler", None), inner) if isinstance(each, SharedIndexSampler)]
    if not found or found[0].fixed:
        return
    has = len(loader)
    has = int(has * limit) if isinstance(limit, float) else min(has, limit)
    if has != kept:
        sampler = found[0]
        raise ConfigError(
            f"{type(sampler).__name__}: value {sampler.name!r} ({sampler.state.text(sampler.name)}) makes {has} "
            f"batches a rank in this epoch, but the trainer counts on the {kept} that it found when it began; give the "
            "sampler num_samples=..., the indices a rank in every epoch"
        )

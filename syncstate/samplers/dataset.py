"""The worker's side: a dataset and a collate function that see the values of their batch."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from syncstate.errors import ConfigError
from syncstate.samplers.stamps import Stamp, find_stamp, unwrap

__all__ = ["SharedBatch", "SharedDataset"]


class SharedBatch(list[Any]):
    """The samples of a batch, a list as collate functions expect it, with the values of the batch.

    Attributes:
        shared: A read-only mapping from names to values.
    """

    _shared: Stamp | None = None

    def __init__(self, samples: Iterable[Any] = (), shared: Stamp | None = None) -> None:
        super().__init__(samples)
        if shared is not None:
            self._shared = shared

    @property
    def shared(self) -> Stamp:
        if self._shared is None:
            raise AttributeError(
                "this batch has no shared values: its indices come from another sampler than SharedBatchSampler; give "
                "the DataLoader batch_sampler=SharedBatchSampler(batch_sampler, state, names)"
            )
        return self._shared


class SharedDataset(Dataset[Any]):
    """A map-style dataset whose collate function sees the values of the batch, as `samples.shared["max_len"]`.

    So does the dataset itself: the index that its `__getitem__` is given has the same attribute, as far as it is a
    whole number, a string or a tuple. A dataset with `__getitems__` is asked for whole batches. All other attributes
    are those of the dataset. The values are those that `SharedBatchSampler` stamped the batch with, so they are the
    same on every rank whatever the workers' pace; treat them as read-only. A batch that a host puts together from
    several has those of its first index.

    This dataset must be the outermost one: `torch.utils.data.Subset` and the like turn the index that they are given
    into another, without the values. Under Accelerate and Lightning nothing is needed; for the `Trainer` of
    Transformers set `remove_unused_columns=False`, or it hands a list of its own to the collate function.

    Do not read a `SharedState` in a dataset, as `state["max_len"]`: with workers that is a copy which stays as it was
    when the worker was started, and without workers a later value than the one that belongs to the batch.

    Args:
        dataset: Has `__getitem__`, or `__getitems__` too. Picklable if workers are started by spawn or forkserver.

    Raises:
        ConfigError: An `IterableDataset`, or nothing that could be indexed: no index reaches it that could be stamped.

    Example::

        def collate(samples):                         # in the worker
            return pad(samples, to=samples.shared["max_len"])

        batches = SharedBatchSampler(BatchSampler(sampler, 32, drop_last=False), state, ["max_len"])
        loader = DataLoader(SharedDataset(dataset), batch_sampler=batches, collate_fn=collate, num_workers=4)
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"SharedDataset: dataset must be map-style (have __getitem__), got {type(dataset).__name__}; an "
                "iterable dataset is given no indices that could carry values: send them as part of its samples"
            )
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):  # a whole batch, from a loader with batch_size=None
            return self.dataset[SharedBatch(map(unwrap, index), find_stamp(index))]
        return self.dataset[unwrap(index)]

    def __getitems__(self, indices: list[Any]) -> SharedBatch:
        """The samples of a batch; the loader asks for them so."""
        whole = getattr(self.dataset, "__getitems__", None)
        keys = [unwrap(index) for index in indices]
        samples = whole(keys) if callable(whole) else [self.dataset[key] for key in keys]
        return SharedBatch(samples, find_stamp(indices))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # While this object is being unpickled, it has no dataset yet that could be asked.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

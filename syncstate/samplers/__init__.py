"""Shared values on their way into data loaders.

- `SharedIndexSampler` deals a shared list of indices out to the ranks.
- `SharedBatchSampler` stamps the indices of each batch with values, in the process that trains.
- `SharedDataset` hands these values to the dataset and the collate function, in the process that loads.

A worker process must not read a `SharedState` that it was given: it holds a copy from the moment when the worker was
started, and nothing refreshes that. And where a worker is at work depends on the clock, so that even a live value would
be another one on another rank for the same batch. Stamped values depend on the number of batches alone.
"""

from syncstate.samplers.batches import SharedBatchSampler
from syncstate.samplers.dataset import SharedDataset
from syncstate.samplers.indices import SharedIndexSampler

__all__ = ["SharedBatchSampler", "SharedDataset", "SharedIndexSampler"]

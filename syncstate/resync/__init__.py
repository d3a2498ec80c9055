"""Parameters and buffers that must be equal on all replicas: checked, repaired, copied or averaged."""

from syncstate.resync.report import DriftReport, TensorDrift
from syncstate.resync.resync import ParameterResync

__all__ = ["DriftReport", "ParameterResync", "TensorDrift"]

"""Ready-made values: sources to give to `SharedState.add`."""

from syncstate.values.curriculum import CurriculumThreshold
from syncstate.values.indices import SampledIndices
from syncstate.values.seed import Seed

__all__ = ["CurriculumThreshold", "SampledIndices", "Seed"]

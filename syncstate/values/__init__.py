"""Ready-made values: sources to give to `SharedState.add`.

Beside them stand `syncstate.values.plateau.Plateau`, a predicate for early stopping, and
`syncstate.values.worker_seeds.WorkerSeeds`, which seeds the workers of a loader from a shared seed.

A source of your own is a function of a `Context`, or an object with `compute(ctx)`, which runs on the main process
only. There is nothing to inherit. What it may have besides:

- `collect(ctx)`: runs on every rank first; main finds the results in `ctx.collected`. With `reduce`, as in `add`.
- `derive(value, ctx)`: what this rank holds, made from what main sent.
- `apply(value, ctx)`: runs on every rank when the value comes into force.
- `state_dict()`, `load_state_dict(d)`: what main keeps from call to call, for checkpoints.
- `initial`: the value before the first sync.

Ten lines make loss weights that follow the gradients of all ranks::

    class Balance:
        def __init__(self, names):
            self.names = names

        def collect(self, ctx):  # on every rank
            return torch.stack([ctx.model.norms[name] for name in self.names])

        def compute(self, ctx):  # on main
            norms = torch.stack(ctx.collected).mean(dim=0)
            return dict(zip(self.names, (norms.mean() / norms).tolist()))

    state.add("weights", Balance(["box", "mask"]), every=Every(steps=50), initial={"box": 1.0, "mask": 1.0})

and it is tested without processes: `Balance(["a", "b"]).compute(Context(collected=[torch.tensor([1.0, 3.0])]))`.
"""

from syncstate.values.curriculum import CurriculumThreshold
from syncstate.values.decision import Decision
from syncstate.values.indices import SampledIndices
from syncstate.values.run_info import RunInfo
from syncstate.values.seed import Seed

__all__ = ["CurriculumThreshold", "Decision", "RunInfo", "SampledIndices", "Seed"]

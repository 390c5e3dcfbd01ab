"""A method of one's own: workers meet the average half-way instead of jumping to it.

    islands run --method examples.my_method:HalfWay --set method.pull=0.25

Run it from the repository's root, or put the file beside you and say `my_method:HalfWay`.
"""

from collections.abc import Sequence

from pydantic import Field

from islands.compression import Update, decode
from islands.methods import Arrival, Context, Shared, WorkerState, dense_update
from islands.methods.diloco import PseudoGradient


class HalfWay(PseudoGradient):
    """Local SGD in which every worker keeps ``1 − pull`` of its distance to the average.

    Inherited: ``sync_every``, ``payload_dtype``, when to send, what (anchor − local), and how that
    is averaged.
    """

    pull: float = Field(0.5, gt=0, le=1)

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        """On the coordinator: move the shared parameters to the workers' average."""
        part = shared.layout.fragments[fragment]
        shared.params[part] -= self.average(shared, fragment, arrivals)
        return dense_update(shared.params[part])

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        """On each worker: the average becomes the anchor, and the parameters move towards it."""
        part = ctx.layout.fragments[fragment]
        average = decode(update.values, update.fmt)
        state.slots["anchor"][part] = average
        state.params[part] = state.params[part].lerp(average, self.pull)

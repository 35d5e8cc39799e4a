"""What a tile of a tiled function is and how it is computed: the same in the forward and in the backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from seqtile.ops.rerun import ForwardState
from seqtile.ops.tiled_checks import check_outputs
from seqtile.ops.watch import Watch


@dataclass
class Plan:
    fn: Callable
    step: int
    dim: int
    inputs: int
    """How many of the saved tensors are inputs; the shared ones follow, then the parameters."""
    shared: int
    state: ForwardState

    def cut(self, tensor: torch.Tensor, tile: slice) -> torch.Tensor:
        return tensor.narrow(self.dim, tile.start, tile.stop - tile.start)

    def run(
        self, watch: Watch, tensors: Sequence[torch.Tensor], error: type[Exception] = ValueError
    ) -> tuple[torch.Tensor, ...]:
        """What fn makes of a tile; raises `error` if it changes what `watch` is over."""
        with self.state.autocast_as_then():
            outputs = self.fn(*tensors)
        watch.check(error)
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        check_outputs(results, tensors[0].shape[self.dim], self.dim)
        return results

    def watch(
        self, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], params: Sequence[torch.Tensor]
    ) -> Watch:
        """Over what fn must not change; what it copies is no more than a tile of the first input."""
        first = self.cut(inputs[0], slice(0, self.step))
        return Watch(self.fn, inputs, shared, params, room=first.numel() * first.element_size())


def plan_for(fn: Callable, inputs: tuple[torch.Tensor, ...], shared: int, step: int, dim: int) -> Plan:
    return Plan(fn, step, dim, len(inputs), shared, ForwardState.now(inputs[0].device))

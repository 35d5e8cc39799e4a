"""Has each token go to the same experts in every pass of a comparison, though rounding would send some to others."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TOP_K = torch.ops.aten.topk.default


class SameChoices(TorchDispatchMode):
    """Entered once, notes what `topk` chooses by the scores of each token. Entered again, has it choose the same by
    scores that are the most like those, whatever chunk they are in."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._notes = True

    def __exit__(self, *error: Any) -> None:
        self._notes = False
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **kwargs or {})
        if function is not _TOP_K or (args[2:3] or (-1,))[0] not in (-1, args[0].dim() - 1):
            return made
        scores, chosen = args[0], made[1]
        rows = scores.flatten(0, -2).float().nan_to_num(0, 0, 0)
        noted = self._noted.setdefault((scores.shape[-1], chosen.shape[-1]), [])
        if self._notes:
            noted.append((rows, chosen.flatten(0, -2)))
        elif noted:
            before, chosen_before = (torch.cat(tensors) for tensors in zip(*noted, strict=True))
            nearest = torch.cdist(rows, before, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
            chosen = chosen_before[nearest].view_as(chosen)
            return scores.gather(-1, chosen), chosen
        return made

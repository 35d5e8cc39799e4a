"""`tiled(..., check=True)`: a few tokens computed whole, once more, and cut in two, which must all agree."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from seqtile.ops.checks import check_no_transform
from seqtile.ops.held import Held, held_by
from seqtile.ops.random_state import (
    default_states,
    is_generator,
    same_state,
    set_default_states,
    set_state,
    state_of,
)
from seqtile.ops.tiled_checks import check_outputs

TOKENS = 8


class Before:
    """What a function holds and torch's random numbers, as they are now."""

    def __init__(self, function: Callable, shared: Sequence[torch.Tensor], device: torch.device):
        held = [*held_by(function), *(Held(f"shared tensor {i}", tensor) for i, tensor in enumerate(shared))]
        self._tensors = [(each, each.value.detach().clone()) for each in held if not is_generator(each.value)]
        self._generators = [(each.name, each.value, state_of(each.value)) for each in held if is_generator(each.value)]
        self._device, self._default = device, default_states(device)

    def put_tensors_back(self) -> list[str]:
        """Returns which of them had changed: in place, or as buffers that others had taken the place of."""
        changed = []
        for each, copy in self._tensors:
            now = each.value if each.owner is None else getattr(each.owner, each.attribute, None)
            is_buffer = each.owner is not None and each.attribute in each.owner._buffers
            if now is not each.value:
                setattr(each.owner, each.attribute, each.value)
            if not _equal(each.value, copy) or (is_buffer and not _equal(now, copy)):
                changed.append(each.name)
                each.value.detach().copy_(copy)
        return changed

    def put_numbers_back(self) -> list[str]:
        """Returns which generators had been drawn from."""
        drawn = [name for name, generator, state in self._generators if not same_state(state_of(generator), state)]
        for _, generator, state in self._generators:
            set_state(generator, state)
        if not all(map(same_state, default_states(self._device), self._default)):
            drawn.append("torch's default generator")
            set_default_states(self._device, self._default)
        return drawn


@torch.compiler.disable(reason="seqtile.tiled(check=True) looks at values")
@torch.no_grad()
def check_by_trial(fn: Callable, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], dim: int) -> None:
    """Raises ValueError if fn, given a few of the tokens, does not compute the same tile by tile. Buffers, inputs and
    random numbers are then as before."""
    check_no_transform("tiled")
    if inputs[0].is_meta:
        raise ValueError("tiled: check=True compares values, and tensors on the meta device have none; leave it out")
    tokens = min(TOKENS, inputs[0].shape[dim])
    given = [tensor.detach().narrow(dim, 0, tokens).clone() for tensor in inputs]
    before = Before(fn, shared, inputs[0].device)
    changed: dict[str, None] = {}  # an ordered set

    def run(start: int, stop: int) -> list[torch.Tensor]:
        pieces = [tensor.narrow(dim, start, stop - start) for tensor in given]
        copies = [piece.clone() for piece in pieces]
        outputs = fn(*copies, *(tensor.detach() for tensor in shared))
        changed.update({f"input {i}": None for i in range(len(pieces)) if not _equal(copies[i], pieces[i])})
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        check_outputs(results, stop - start, dim)
        return [result.clone() for result in results]

    def run_from_before(start: int, stop: int) -> list[torch.Tensor]:
        before.put_tensors_back()
        before.put_numbers_back()
        return run(start, stop)

    try:
        whole = run(0, tokens)
        drawn = before.put_numbers_back()
        again = run(0, tokens)  # with what the first run left behind
        changed.update(dict.fromkeys(before.put_tensors_back()))
        halves = [run_from_before(0, tokens // 2), run_from_before(tokens // 2, tokens)] if tokens > 1 else [whole]
    finally:
        before.put_tensors_back()
        before.put_numbers_back()
    found = [f"it changes {', '.join(changed)}"] * bool(changed)
    found += [f"it draws random numbers from {', '.join(drawn)}, others in tiles than in the whole"] * bool(drawn)
    repeats = all(map(_close, whole, again))
    if not repeats and not changed:
        found.append("it makes something else of the same tokens when it runs again: it keeps state or draws numbers")
    if not drawn and (repeats or changed):
        if not all(_close(result, torch.cat(parts, dim)) for result, *parts in zip(whole, *halves, strict=True)):
            found.append("it mixes tokens: cut in two they give something else than whole")
    if found:
        raise ValueError(f"tiled: fn is not the same tile by tile: {'; '.join(found)}; leave it untiled, or mend that")


def _equal(now: Any, before: torch.Tensor) -> bool:
    if not isinstance(now, torch.Tensor) or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())  # NaN is NaN


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for rounding, which depends on how many tokens a product has; integers equal."""
    if not ours.is_floating_point():
        return _equal(ours, theirs)
    tolerance = torch.finfo(ours.dtype).eps ** 0.5
    largest = ours.nan_to_num(posinf=0, neginf=0).abs().max().item()
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * largest, equal_nan=True)

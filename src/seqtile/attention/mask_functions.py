"""Records the masks that a model makes outside its text model as recipes, so that no rank makes one of length x length.

In Gemma 3 and others, the tokens of an image see each other in both directions. Hugging Face calls the mask function
that is registered for an attention. Here this function returns a `MaskRecipe`, which the model passes to its text
model.
"""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from seqtile.attention.heads import Rows
from seqtile.attention.layout import edges_of, rows_between

OUTSIDE = "seqtile_masks_outside"
"""The attention's name while code outside the text model runs."""
_CAUSAL = {"causal_mask_function", "and_masks", "or_masks", "sliding_window_overlay", "padding_mask_function"}
_CAUSAL |= {"packed_sequence_mask_function", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function"}
_CAUSAL |= {"packed_sequence_compatibility_function"}
_TWO_WAYS = "blockwise_overlay"


class MaskRecipe(NamedTuple):
    """The parts of a mask that layers do not know: everything except causality, documents and a window."""

    padding: Tensor | None
    """[B, S], True for tokens, False for padding."""
    spans: Tensor | None
    """[B, S], for each token the number of its span, whose tokens see each other in both directions; -1 outside of
    spans."""
    function: Callable[..., Tensor]
    """function(b, h, query, key) returns whether a query sees a key in row b and head h."""


def mask_recipe(*, mask_function: Callable, attention_mask: Tensor | None = None, **_: Any) -> MaskRecipe:
    """Replaces Hugging Face's functions that make masks. Raises ValueError for an unknown mask."""
    spans, functions = None, list(_functions_in(mask_function))
    if causal_mask_function not in functions:
        raise ValueError("expected causal masks, got another one from outside the text model; leave this model whole")
    for function in functions:
        name = function.__qualname__.partition(".")[0]
        known = function.__module__ == "transformers.masking_utils" and (name in _CAUSAL or name == _TWO_WAYS)
        if not known:
            raise ValueError(
                f"a mask of {function.__module__}.{function.__qualname__} is not supported over ranks; expected "
                "causality, windows, documents and spans that see each other both ways; leave this model whole"
            )
        if name == _TWO_WAYS:
            spans = next(cell.cell_contents for cell in function.__closure__)
    return MaskRecipe(attention_mask, spans, mask_function)


def _functions_in(function: FunctionType) -> Iterator[FunctionType]:
    """Yields a function and those in its closure, recursively."""
    yield function
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for each in held if isinstance(held, tuple) else (held,):
            if isinstance(each, FunctionType):
                yield from _functions_in(each)


def spans_of(recipe: MaskRecipe, window: int | None) -> tuple[Rows, ...]:
    """For each row of the batch, returns the [start, stop) of its spans, () without spans. One wait for the device.

    Raises ValueError if a span has a hole, or reaches further back than the layers' window.
    """
    if (numbers := recipe.spans) is None:
        return ()
    inside = numbers >= 0
    begins = inside & (numbers != numbers.roll(1, 1))
    begins[:, 0] = inside[:, 0]
    places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    positions = places - (places * begins).cummax(1).values  # they restart with every span
    rows = rows_between(edges_of(positions, inside))
    for row, (spans, of_row) in enumerate(zip(rows, numbers.cpu(), strict=True)):
        if len({int(of_row[start]) for start, _ in spans}) < len(spans):
            raise ValueError("tokens that see each other both ways are not contiguous; leave this model whole")
        for start, stop in spans:
            ends = numbers.new_tensor([row, 0, stop - 1, start])
            if window is not None and stop - start > window and recipe.function(*ends):  # the last sees the first
                raise ValueError(
                    f"{stop - start} tokens see each other both ways, further back than the window of {window}; leave "
                    "this model whole"
                )
    return rows if any(rows) else ()

"""Reads what a mask of Hugging Face's would say, before it is made, from the function that makes its elements.

Hugging Face composes this function of a few known ones: causality, a window, documents, chunks, and spans of tokens
that see each other in both directions, as an image's in Gemma 3. Their arguments stand in their closures.
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
_TWO_WAYS, _WINDOW, _DOCUMENTS = "blockwise_overlay", "sliding_window_overlay", "packed_sequence_mask_function"
_CHUNKS, _POSITIONS = "chunked_overlay", "remap_positions_for_packed_sequence"
_CAUSAL = {"causal_mask_function", "and_masks", "or_masks", "padding_mask_function"}
_CAUSAL |= {"add_offsets_to_mask_function", "packed_sequence_compatibility_function"}
_CAUSAL |= {_TWO_WAYS, _WINDOW, _DOCUMENTS, _CHUNKS, _POSITIONS}


class MaskRecipe(NamedTuple):
    """The parts of a causal mask."""

    padding: Tensor | None
    """[B, S], True for tokens, False for padding."""
    spans: Tensor | None
    """[B, S], for each token the number of its span, whose tokens see each other in both directions; -1 outside of
    spans."""
    function: Callable[..., Tensor]
    """function(b, h, query, key) returns whether a query sees a key in row b and head h."""
    documents: Tensor | None = None
    """[B, S], for each token the number of its document; None if each row is one."""
    window: int | None = None
    """How many keys a query sees, its own included."""
    chunk: int | None = None
    """The length of the chunks of positions beyond which no query sees."""
    positions: Tensor | None = None
    """[B, S], by which chunks are counted; None: by places in a row, as transformers 5.16 does."""


def recipe_of(mask_function: Callable, padding: Tensor | None) -> MaskRecipe | str:
    """Returns what a mask function says; the name of a function that is not known, if there is one."""
    found: dict[str, list[Any]] = {}
    functions = list(_functions_in(mask_function))
    for function in functions:
        name = function.__qualname__.partition(".")[0]
        if function.__module__ != "transformers.masking_utils" or name not in _CAUSAL:
            return f"{function.__module__}.{function.__qualname__}"
        if name == _POSITIONS and any(each.__qualname__.startswith(_TWO_WAYS) for each in _functions_in(function)):
            return "spans that are looked up by positions"  # those of a packed row: they hit other tokens
        if name in found and name in (_TWO_WAYS, _WINDOW, _CHUNKS, _DOCUMENTS):
            return f"two of {name}"
        found[name] = [cell.cell_contents for cell in function.__closure__ or ()]
    if causal_mask_function not in functions:
        return "a mask that is not causal"
    tensors = {name: next((x for x in held if isinstance(x, Tensor)), None) for name, held in found.items()}
    sizes = {name: next((x for x in held if isinstance(x, int)), None) for name, held in found.items()}
    spans, documents = tensors.get(_TWO_WAYS), tensors.get(_DOCUMENTS)
    if spans is not None and documents is not None and functions[0].__qualname__.startswith("or_masks"):
        return "spans that reach into other documents"  # in transformers 5.16
    counted = sizes.get(_WINDOW), sizes.get(_CHUNKS), tensors.get(_POSITIONS)
    return MaskRecipe(padding, spans, mask_function, documents, *counted)


def mask_recipe(*, mask_function: Callable, attention_mask: Tensor | None = None, **_: Any) -> MaskRecipe:
    """Replaces Hugging Face's functions that make masks outside a text model whose tokens are over ranks, so that no
    rank makes one of length x length. Raises ValueError for an unknown mask."""
    recipe = recipe_of(mask_function, attention_mask)
    if isinstance(recipe, str) or recipe.chunk is not None:
        what = recipe if isinstance(recipe, str) else "chunked attention"
        raise ValueError(
            f"expected masks of causality, windows, documents and spans that see each other both ways, got {what} from "
            "outside the text model, which is not supported over ranks; leave this model whole"
        )
    return recipe


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

"""A decoder layer of any shape, tiled around its attention: its own forward runs chunk by chunk, first for what comes
before attention, then for what comes after it.

    1. each chunk   forward(x) up to the attention function ──> queries, keys, values of the chunk; the rest is not run
    2. the whole    the model's attention function, as the layer asked for it ──> attn_output
    3. each chunk   forward(x) whose attention function returns the chunk of attn_output ──> output of the chunk

For layers that call Hugging Face's attention function once and compute everything else token by token. Step 3 projects
queries, keys and values once more; of a layer of Llama's shape it runs attention's output projection alone.

The layer gets, besides its hidden states,

    a tensor with a row a token              its rows
    a dict that layers hand to each other    a copy: what is written into it leaves the chunk as further outputs
    a mask, a cache, a number                as it is
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.models.chunked import InChunks, call_in_chunks, call_with_further_outputs, recording
from seqtile.models.forward.attention_masks import check_attention
from seqtile.models.hooks import recorded_names_of
from seqtile.models.placement import computed_forward
from seqtile.models.recognise import source_of
from seqtile.ops.state import Overridden, having
from seqtile.renamed import CACHE_NAMES, cache_in

_ASKS = "ALL_ATTENTION_FUNCTIONS.get_interface("
_HEADS = ("query", "key", "value")
_WHOLE = ("attention_mask", *CACHE_NAMES)  # what is not of a chunk's tokens alone


class _Reached(Exception):
    """Ends a forward at its attention function."""


class _CacheIsRead(Exception):
    """A layer does more with its cache than add keys and values and attend to what that returns."""


class _CacheOfChunks:
    """Stands in for a cache while chunks are computed; the cache itself gets the keys and values of all chunks at
    once."""

    def __init__(self, cache: Cache):
        self._cache = cache
        self.get_seq_length = getattr(cache, "get_seq_length", None)
        self.update_with: tuple | None = None
        """The further arguments of `update`, such as the layer's index."""
        self.is_filled = False

    def update(self, keys: torch.Tensor, values: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        self.update_with, self.of_chunk = (others, named), (keys, values)
        return keys, values

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises _CacheIsRead if an attention gets other keys or values than those that were added."""
        if self.update_with is None or keys is not self.of_chunk[0] or values is not self.of_chunk[1]:
            raise _CacheIsRead

    def add(self, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Adds the keys and values of all tokens. `options` are attention's other arguments for all tokens: from
        transformers 5.24 on, layers pass them to the cache."""
        others, named = self.update_with
        if "kwargs" in named:
            named = named | {"kwargs": options}
        self.is_filled = True
        return self._cache.update(keys, values, *others, **named)

    def __getattr__(self, name: str) -> Any:
        raise _CacheIsRead


def any_layer_refusal(layer: nn.Module) -> str | None:
    """Says why a layer cannot be tiled around its attention, as far as its code shows."""
    asking = [module for module in layer.modules() if _ASKS in (source_of(computed_forward(module)) or "")]
    if len(asking) != 1:
        return f"expected one attention that asks for Hugging Face's attention function, got {len(asking)}"
    names = getattr(computed_forward(asking[0]), "__globals__", {})
    if names.get("ALL_ATTENTION_FUNCTIONS") is not ALL_ATTENTION_FUNCTIONS:
        return "its attention looks its function up in a table of its own"
    if any(isinstance(module, _ConvNd) for module in layer.modules()):
        return "it has a convolution along the sequence"
    return None


@torch.compiler.disable(reason="seqtile runs a layer's forward in two parts")
def call_layer_in_chunks(
    layer: nn.Module,
    modules: InChunks,
    forward: Callable,
    hidden: torch.Tensor,
    given: dict[str, Any],
    chunk_tokens: int | None,
    is_llamas: bool = False,
) -> Any:
    """Returns forward(layer, hidden, **given), chunk by chunk around its attention. `hidden` is [B, S, D], or of
    several streams [B, S, N, D] or [N, B, S, D]. `is_llamas`: the layer has Llama's shape. Given a cache, any other is
    called without gradients."""
    _install_look_up()
    cache = cache_in(given)
    if isinstance(cache, Cache) or (is_llamas and hasattr(cache, "update") and not isinstance(cache, _CacheOfChunks)):
        of_chunks = _CacheOfChunks(cache)
        try:
            cached = given | {name: of_chunks for name in CACHE_NAMES if given.get(name) is cache}
            return call_layer_in_chunks(layer, modules, forward, hidden, cached, chunk_tokens, is_llamas)
        except (_CacheIsRead, ValueError) as error:
            if of_chunks.is_filled:  # another run would add keys and values once more
                raise ValueError(
                    f"a {type(layer).__name__} cannot fill a cache in chunks; apply with layer=False"
                ) from error
            return forward(layer, hidden, **given)
    axis = _token_axis(layer, hidden, given)
    rows, length = hidden.shape[axis - 1 : axis + 1]
    call = _LayerCall(layer, forward, axis, LayerArguments(given, rows, length), cache, is_llamas)
    inputs = (hidden.movedim(axis, 1), *call.arguments.tensors)
    made = call_in_chunks(call.before_attention, modules, *inputs, chunk_tokens=chunk_tokens, dim=1, used_alone=True)
    heads = call.whole_heads(made if isinstance(made, tuple) else (made,))
    if call.cache is not None:
        heads[1:] = call.cache.add(*heads[1:], call.options)
    check_attention(call.module, heads[0], call.mask)
    attn_output = call.function(call.module, *heads, call.mask, **call.options)[0]
    attn_output = attn_output if call.projects_again else attn_output.flatten(2)
    output, (rest, further) = call_with_further_outputs(
        call.behind_attention, modules, inputs[0], attn_output, *inputs[1:], rows=rows, chunk_tokens=chunk_tokens
    )
    for name, put in call.whole_written(further, heads).items():
        given[name].update(put)
    output = output.movedim(1, axis).contiguous()
    return output if rest is None else (output, *rest)


class LayerArguments:
    """What a layer is `given` for the whole sequence, by name, as it is now: when a backward runs the layer again,
    other layers may have written into its dicts.

    The dicts themselves are not kept. What the layer writes into them has a graph that leads back to this object.
    """

    def __init__(self, given: dict[str, Any], rows: int, length: int):
        self._rest = {name: given[name] for name in _WHOLE if name in given}
        leaves, self._spec = tree_flatten({name: value for name, value in given.items() if name not in _WHOLE})
        self._leaves = [copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf for leaf in leaves]
        axes = (_axis_of(leaf, rows, length) for leaf in leaves)
        self._axes = {i: axis for i, axis in enumerate(axes) if axis is not None}
        tensors = [(leaves[i], axis) for i, axis in self._axes.items()]
        self.tensors = [leaf.unsqueeze(-1) if leaf.dim() == 2 else leaf.movedim(axis, 1) for leaf, axis in tensors]
        """The tensors to cut, each with its tokens along dimension 1, and at least one more dimension after it."""

    def of_chunk(self, pieces: tuple[torch.Tensor, ...]) -> "ChunkArguments":
        """Returns the layer's arguments for a chunk, given its `pieces` of `tensors`."""
        leaves = [copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf for leaf in self._leaves]
        for (i, axis), piece in zip(self._axes.items(), pieces, strict=True):
            leaves[i] = piece.squeeze(-1) if self._leaves[i].dim() == 2 else piece.movedim(1, axis)
        wholes = {id(leaf): whole for leaf, whole in zip(leaves, self._leaves, strict=True)}
        if dicts := [dict(leaf) for leaf in leaves if isinstance(leaf, MutableMapping)]:
            wholes |= {id(leaf): leaf for leaf in tree_leaves(dicts)}
        return ChunkArguments(tree_unflatten(leaves, self._spec) | self._rest, wholes)


class ChunkArguments:
    """A layer's arguments for a chunk, by name."""

    def __init__(self, given: dict[str, Any], wholes: dict[int, Any]):
        self.given, self._wholes = given, wholes

    def whole_of(self, tensor: Any) -> torch.Tensor | None:
        """Returns the whole sequence's tensor from which `tensor` was cut; None for any other tensor."""
        whole = self._wholes.get(id(tensor))
        return whole if isinstance(whole, torch.Tensor) else None

    def whole_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns an attention function's arguments for the whole sequence, given those for the chunk."""
        found = {}
        for name, value in options.items():
            known = not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter)
            if not known and (value := self.whole_of(value)) is None:
                raise ValueError(f"expected an attention that is given no tensor computed from its tokens, got {name}")
            found[name] = value
        return found

    def contents(self) -> dict[str, dict[tuple, Any]]:
        """Returns what the arguments hold, by their names: each part with its path."""
        return {name: dict(_parts_of(value)) for name, value in self.given.items() if name not in _WHOLE}

    def written(self, contents: dict[str, dict[tuple, Any]]) -> dict[str, dict[Any, Any]]:
        """Returns what the layer has put into dicts that it got, given the `contents` before. Raises ValueError if it
        changed anything else."""
        found: dict[str, dict[Any, Any]] = {}
        for name, before in contents.items():
            value, after = self.given[name], dict(_parts_of(self.given[name]))
            changed = [path for path in before | after if before.get(path, self) is not after.get(path, self)]
            put = [path[0] for path in changed if len(path) == 1 and path in after]
            if any(path[0] not in put for path in changed) or (put and not isinstance(value, MutableMapping)):
                raise ValueError(
                    f"a layer that is computed chunk by chunk changes {name}: expected it to put tensors with a row "
                    "for each token into a dict, or nothing; apply with layer=False"
                )
            if put:
                found[name] = {key: value[key] for key in put}
        return found


def _parts_of(thing: Any, depth: int = 3) -> Iterator[tuple[tuple, Any]]:
    """Yields the contents of a container or an object, recursively, each with its path."""
    if isinstance(thing, MutableMapping):
        parts = thing.items()
    elif isinstance(thing, list | tuple | set):
        parts = enumerate(thing)
    elif callable(thing) or not hasattr(thing, "__dict__") or isinstance(thing, torch.Tensor):
        return
    else:
        parts = vars(thing).items()
    for step, part in list(parts):
        yield (step,), part
        if depth:
            yield from (((step, *path), inner) for path, inner in _parts_of(part, depth - 1))


def _axis_of(leaf: Any, rows: int, length: int) -> int | None:
    """Returns the dimension of a tensor along which it has a row for each of the tokens; None if there is none."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
        return None
    axes = [axis for axis in (1, 2) if axis < leaf.dim() and leaf.shape[axis] == length]
    if len(axes) > 1 and leaf.shape[0] not in (1, rows):  # [3, B, S], as many rows as tokens
        return 2
    return axes[0] if axes else None


def _is_recorded(attention: nn.Module) -> bool:
    """Returns whether Hugging Face may record what an attention, or a module in it, returns besides its weights."""
    modules = (attention, *attention._modules.values())  # of classes that Hugging Face records
    hooked = [module for module in modules if module is not None and module._forward_hooks]
    return any("attentions" not in name for module in hooked for name in recorded_names_of(module))


class _LayerCall:
    """A call of a layer, of which chunks are run: before its attention, and behind it."""

    function: Callable
    """Found by the first chunk before attention, as are `module`, `mask` and `options`: the model's attention function,
    and what it is given besides queries, keys and values."""

    def __init__(
        self, layer: nn.Module, forward: Callable, axis: int, arguments: LayerArguments, cache: Any, is_llamas: bool
    ):
        self.layer, self.forward, self.axis, self.arguments = layer, forward, axis, arguments
        self.is_llamas, self.projects_again = is_llamas, not is_llamas or _is_recorded(layer.self_attn)
        self.module: nn.Module | None = None
        self.cache = cache

    def before_attention(self, hidden: torch.Tensor, *pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns a chunk's queries, keys and values [B, C, H, K], except those that the layer got whole."""
        chunk, made = self.arguments.of_chunk(pieces), []

        def stand_in(attention_function: Callable) -> Callable:
            self.function = attention_function
            return stop

        def stop(module: nn.Module, *tensors: torch.Tensor, **options: Any) -> None:
            named = dict(zip((*_HEADS, "attention_mask"), tensors, strict=False)) | options
            heads = {name: named.pop(name) for name in _HEADS}
            if self.cache is not None:
                self.cache.check(heads["key"], heads["value"])
            wholes = {name: chunk.whole_of(part) for name, part in heads.items()}
            made.extend(_by_token(name, heads[name], hidden) for name in _HEADS if wholes[name] is None)
            if self.module is None:
                self.module, self.mask, self._wholes = module, named.pop("attention_mask", None), wholes.values()
                self.options = chunk.whole_options(named)
            raise _Reached

        try:
            with recording(None):
                self._run(hidden, chunk, stand_in, self.layer)
        except _Reached:
            return tuple(made)
        except RuntimeError as error:  # of an attention that computes all itself
            if self.module is not None or self.is_llamas or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"a {type(self.layer).__name__} that is given a chunk of its tokens fails before it asks for an "
                f"attention function ({error}); apply with layer=False"
            ) from error
        raise ValueError(f"a {type(self.layer).__name__} asked for no attention function; apply with layer=False")

    def whole_heads(self, made: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Returns queries, keys and values [B, H, S, K], joined from chunks or as the layer got them."""
        of_chunks = iter(made)
        return [next(of_chunks).transpose(1, 2) if whole is None else whole for whole in self._wholes]

    def behind_attention(
        self, hidden: torch.Tensor, attn_output: torch.Tensor, *pieces: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[list | None, list]]:
        """Returns a chunk's hidden states; what else the layer returns, None if nothing; and what it wrote into dicts,
        None of what is known whole."""
        chunk, heads = self.arguments.of_chunk(pieces), []

        def attended(module: nn.Module, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
            heads.extend((dict(zip(_HEADS, tensors, strict=False)) | options)[name] for name in _HEADS)
            return attn_output.contiguous(), None

        layer, contents = self.layer, {}
        if self.projects_again:
            contents = chunk.contents()
        else:  # it is given no dicts of its own, and attention's output is known
            output_projection = layer.self_attn.o_proj
            layer = Overridden(layer, self_attn=lambda *_, **__: (output_projection(attn_output), None))
        output = self._run(hidden, chunk, lambda _: attended, layer)
        states, *rest = output if isinstance(output, tuple) else (output,)
        if not isinstance(states, torch.Tensor):
            raise ValueError(f"a {type(self.layer).__name__} returns a {type(states).__name__}; apply with layer=False")
        written, self._spec = tree_flatten(chunk.written(contents))
        known = [next((i for i, head in enumerate(heads) if head is part), chunk.whole_of(part)) for part in written]
        self._known = known
        further = [part if whole is None else None for part, whole in zip(written, known, strict=True)]
        return states.movedim(self.axis, 1), (rest if isinstance(output, tuple) else None, further)

    def whole_written(self, further: list[torch.Tensor], heads: list[torch.Tensor]) -> dict[str, dict[Any, Any]]:
        """Returns what the layer wrote into dicts, by the names of these. Keys and values are those that its attention
        was given."""
        known = [heads[whole] if isinstance(whole, int) else whole for whole in self._known]
        parts = [part if whole is None else whole for part, whole in zip(further, known, strict=True)]
        return tree_unflatten(parts, self._spec)

    def _run(self, hidden: torch.Tensor, chunk: ChunkArguments, stand_in: Callable, layer: Any) -> Any:
        # torch's FlopCounterMode fails on a view of a leaf that is made without gradients.
        states = hidden if self.axis == 1 else hidden.movedim(1, self.axis)
        with having(_stand_in, stand_in):
            return self.forward(layer, states.contiguous(), **chunk.given)


def _by_token(name: str, heads: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns heads [B, H, C, K] as [B, C, H, K]. Raises ValueError if they are not of a chunk's tokens, one each."""
    if heads.dim() != 4 or heads.shape[2] != hidden.shape[1]:
        raise ValueError(
            f"expected an attention that is given a {name} for each token, got {list(heads.shape)} for a chunk of "
            f"{hidden.shape[1]}; apply with layer=False"
        )
    return heads.transpose(1, 2)


def _token_axis(layer: nn.Module, hidden: torch.Tensor, given: dict[str, Any]) -> int:
    """Returns the dimension of a layer's hidden states that is along the tokens."""
    axes = [1] if hidden.dim() == 3 else []
    if hidden.dim() == 4:  # of several streams: as long as the angles [.., S, K]
        angles = [leaf for leaf in tree_leaves(given.get("position_embeddings")) if isinstance(leaf, torch.Tensor)]
        axes = [axis for axis in (1, 2) if {angle.shape[-2] for angle in angles} == {hidden.shape[axis]}]
    if len(axes) != 1:
        raise ValueError(
            f"this layer cannot be tiled: a {type(layer).__name__} is given hidden states {list(hidden.shape)}, "
            "expected [batch, tokens, width], or four dimensions, one of which is as long as the rotary embedding's; "
            "apply with layer=False"
        )
    return axes[0]


_stand_in: ContextVar[Callable[[Callable], Callable] | None] = ContextVar("attention_function", default=None)
"""Layers that this thread runs use stand_in(function) as their attention function. Set it inside what a backward calls
again, since autograd's threads inherit nothing."""


def _install_look_up() -> None:
    """Replaces Hugging Face's look-up of attention functions, once. The new one returns what `_stand_in` makes of
    it in the calling thread, else what the old one finds."""
    find = ALL_ATTENTION_FUNCTIONS.get_interface
    if hasattr(find, "_seqtile"):
        return

    def get_interface(name: str, default: Callable) -> Callable:
        if torch.compiler.is_compiling() or (stand_in := _stand_in.get()) is None:
            return find(name, default)
        with having(_stand_in, None):  # of two threads that came here first, each has replaced it
            found = find(name, default)
        return stand_in(found)

    get_interface._seqtile = True
    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface

"""Cuts whole batches at the text model, so that code before and after it need not know of ranks.

    any trainer ── model(whole batch) ── embeddings, images merged ── WholeBatches ── head, any loss, on every rank
                                                                      │        ▲
                                               this rank's tokens ────┘        └──── `TokenShard` of hidden states
                                                               text model over ranks

A forward with a cache, as in `generate`, runs whole on every rank.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers import AttentionMaskInterface, PreTrainedModel

from seqtile.attention.backends import averages_padding, check_has_masks
from seqtile.attention.heads import count, within
from seqtile.attention.layout import document_edges, documents_at
from seqtile.attention.mask_functions import OUTSIDE, MaskRecipe, mask_recipe, spans_of
from seqtile.renamed import cache_in
from seqtile.sp.attention import NAME
from seqtile.sp.images import DealtImages
from seqtile.sp.layout import ShardedLayout
from seqtile.sp.owners import Owners, depends_on_all_ranks, with_whole_gradient
from seqtile.sp.prefixes import PrefixTree, prefix_tree
from seqtile.sp.same_batch import bits, hash_of
from seqtile.sp.sharding_hooks import BATCH_HASH, Forward, ShardingHooks, check_lengths, check_tokens
from seqtile.sp.shards import hash_of_tokens, places_of, sequence_dim, shards_of
from seqtile.sp.token_shard import shared

_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # some models pass them on to their text model
_TOKENS = ("input_ids", "inputs_embeds")
_KINDS = ("full_attention", "sliding_attention")
"""Hugging Face's names for layers without and with a window."""


def text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a model that computes its tokens' hidden states. Raises ValueError if none is found."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder, expected only a decoder; leave this model whole")
    found = model.get_decoder()
    if not isinstance(found, PreTrainedModel) or all(found is not module for module in model.modules()):
        raise ValueError(f"the text model of {type(model).__name__} is not found; expected one as its get_decoder()")
    return found


class WholeBatches:
    """Cuts a batch before the text model, and returns the hidden states of all its tokens."""

    takes_whole = True
    expected = (
        "the same whole batch on every rank of a group: draw samples by ctx.data_parallel_rank of "
        "ctx.data_parallel_size; for other batches on every rank sp.restore(model) first"
    )

    def __init__(self, sharding: ShardingHooks):
        self.sharding = sharding
        AttentionMaskInterface.register(OUTSIDE, mask_recipe)
        if (outer := sharding.outer) is not sharding.model:
            sharding.handles.append(outer.register_forward_pre_hook(self.begin, with_kwargs=True))
            sharding.handles.append(outer.register_forward_hook(self.end, always_call=True))
            if not sharding.is_alone:
                sharding.handles.append(DealtImages(self))

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hashes the outer model's batch. From now on masks are recorded as recipes instead of made."""
        sharding = self.sharding
        sharding.take_chosen_attention()
        tensors = [each for each in tree_flatten((args, sorted(kwargs.items())))[0] if isinstance(each, Tensor)]
        forward = Forward(sharding.at_rest if sharding.is_alone else OUTSIDE, position_ids=kwargs.get("position_ids"))
        forward.has_gradient = any(tensor.requires_grad for tensor in tensors)
        sharding.run(forward)
        if cache_in(kwargs) is not None:
            sharding.bypass()
        elif not sharding.is_alone:
            forward.batch_hash = hash_of({str(i): bits(tensor) for i, tensor in enumerate(tensors)})

    def end(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.sharding.run(Forward(self.sharding.at_rest, last_position=self.sharding.forward.last_position))

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Cuts the batch."""
        sharding, forward = self.sharding, self.sharding.forward
        sharding.take_chosen_attention()
        if (why := _row_by_row(kwargs, sharding.is_alone)) is not None:
            tokens = next((each for each in (*args, *map(kwargs.get, _TOKENS)) if each is not None), None)
            sharding.last_batch = 0 if tokens is None else tokens.shape[:2].numel(), 0, why
            sharding.bypass()
            return args, kwargs
        if forward.calls and forward.batch_hash is not None:
            raise ValueError(f"{type(module).__name__} is called twice in a forward, expected once; leave it whole")
        recipes = _take_recipes(kwargs)
        batch = self._by_name(args, kwargs)
        tokens = batch.get("input_ids", batch.get("inputs_embeds"))
        tree = self._tree(batch, tokens, recipes)
        if sharding.is_alone and tree is None:
            sharding.bypass()
            return args, kwargs
        sharding.run(replace(forward, attention=NAME, is_bypassed=False, calls=forward.calls + 1, tree=tree))
        shard, layout = self._cut(batch, tokens)
        window = getattr(sharding.model.config, "sliding_window", None)
        layout.is_masked_outside = any(recipes)
        layout.spans = tuple(spans_of(recipe, window) if recipe else () for recipe in recipes)
        if (rows := max(map(len, layout.spans))) and len(layout.documents) == 1:
            layout.documents = layout.documents * rows  # the same for each row
        sharding.forward.layout = layout
        return (), shard

    def _by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the text model's arguments by name."""
        if len(args) > 1:
            raise ValueError("over ranks: expected input_ids or inputs_embeds first, and the rest by keyword")
        kwargs = kwargs | ({"input_ids": args[0]} if args else {})
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = self.sharding.forward.position_ids
        batch = {name: value for name, value in kwargs.items() if value is not None and name not in _OF_THE_LOSS}
        if "input_ids" not in batch and "inputs_embeds" not in batch:
            name = type(self.sharding.model).__name__
            raise ValueError(f"{name}: expected input_ids or inputs_embeds, got neither")
        if BATCH_HASH in batch:
            raise ValueError(
                'this batch is a shard already, expected a whole one: batches="whole" cuts it inside the model'
            )
        return batch

    def _tree(self, batch: dict[str, Any], tokens: Tensor, recipes: list[MaskRecipe | None]) -> PrefixTree | None:
        """Returns the prefix tree of a batch; None if each row is computed by itself."""
        sharding = self.sharding
        if sharding.min_tokens is None:
            return None
        if any(recipe and recipe.spans is not None for recipe in recipes):
            tree = "the model makes masks before its text model"
        elif sharding.forward.has_gradient or (tokens.grad_fn is None and tokens.requires_grad):
            tree = "inputs require a gradient, each row its own"
        else:
            check_has_masks(sharding.implementation)
            averages = averages_padding(sharding.model, sharding.implementation)
            tree = prefix_tree(batch, *tokens.shape[:2], sharding.min_tokens, averages)
        saved, why = (0, tree) if isinstance(tree, str) else (tree.saved, None)
        sharding.last_batch = tokens.shape[:2].numel(), saved, why
        return None if isinstance(tree, str) else tree

    def compare_batch(self) -> None:
        """Raises ValueError on every rank if the ranks of the group have different batches. Called before the first
        collective of a forward, once: one small collective and one wait for the device."""
        forward = self.sharding.forward
        if not forward.is_compared:
            none = torch.zeros(1, 1, dtype=torch.int64, device=forward.batch_hash.device)
            self.sharding.compare(none, {"position_ids": none}, forward.batch_hash)
            forward.is_compared = True

    def _cut(self, batch: dict[str, Any], tokens: Tensor) -> tuple[dict[str, Any], ShardedLayout]:
        """Returns this rank's part of the text model's arguments, and the layout. Raises ValueError if an argument
        cannot be cut, and on every rank if the ranks have different batches."""
        sp_group, forward = self.sharding.sp_group, self.sharding.forward
        (rows, length), tree = tokens.shape[:2], forward.tree
        batch.setdefault("position_ids", torch.arange(length, device=tokens.device)[None])
        if tokens.requires_grad and (tokens.is_leaf or depends_on_all_ranks(tokens)):  # each rank needs its gradient
            batch["inputs_embeds"] = with_whole_gradient(tokens, sp_group)
        if tree is not None:
            batch, (rows, length) = tree.flat(batch), (1, len(tree.taken))
        forward.owners = Owners.of_parts(rows, length, sp_group)
        for name, value in batch.items():
            if name != "input_ids" and (features := _own_features(value, batch, forward.owners)) is not None:
                batch[name] = features
            elif _has_tokens(name, value, rows, length):
                shapes = [list(each.shape) for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
                raise ValueError(
                    f"{name} of {type(self.sharding.model).__name__} has its tokens in an unknown place: {shapes} for "
                    f"{rows} x {length} tokens; leave the model whole: sp.restore(model)"
                )
        check_tokens(batch, rows, length, "one value a token")
        layout = self._layout(batch, rows, length)
        [shard] = shards_of(batch, rows, length, [sp_group.rank], sp_group.nodes)
        layout.position_ids = shard["position_ids"]
        if tree is not None:
            forward.owners = Owners(places_of(layout.length, sp_group.nodes)[tree.places], layout.local, sp_group)
        return shard, layout

    def _layout(self, batch: dict[str, Any], rows: int, length: int) -> ShardedLayout:
        """Returns the layout of a whole batch. One small collective if the ranks' batches were not compared before, and
        one wait for the device. Raises ValueError on every rank if they differ."""
        sharding, forward = self.sharding, self.sharding.forward
        tree, mask, local = forward.tree, batch.get("attention_mask"), -(-length // sharding.sp_group.size)
        if tree is None or not (sharding.is_alone or forward.is_compared):
            batch_hash = hash_of_tokens(batch, rows, length) if forward.batch_hash is None else forward.batch_hash
            tokens = batch.get("input_ids", batch.get("inputs_embeds"))
            edges = document_edges(batch["position_ids"], mask)
            forward.last_position, edges = sharding.compare(tokens, batch, batch_hash, edges)
        if tree is not None:
            forward.last_position = tree.last_position
            layout = ShardedLayout(sharding.sp_group, local, (tree.documents,), sharding.implementation)
            layout.parents = tree.parents
            return layout
        layout = ShardedLayout(sharding.sp_group, local, documents_at(edges, mask is not None), sharding.implementation)
        layout.has_mask = mask is not None
        check_lengths(batch, layout)
        if layout.length > length:
            layout.whole_length = length
            if mask is None:  # padding is a document of its own
                layout.documents = tuple((*row, (length, layout.length)) for row in layout.documents)
        return layout

    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Returns the output with hidden states of all tokens, of which each rank holds its own."""
        return tree_map_only(Tensor, self._of_all, output)

    def _of_all(self, value: Tensor) -> Tensor:
        """Returns a tensor of the text model's output; if it is of this rank's tokens, as one of all tokens."""
        forward, sp_group = self.sharding.forward, self.sharding.sp_group
        owners, local = forward.owners, forward.layout.local
        rows, length = owners.shape if forward.tree is None else (1, local * sp_group.size)
        if value.dim() < 2:
            return value
        if value.shape[0] == rows * local and value.dim() == 2:  # a router's logits
            value, owners = value.view(rows, local, -1), owners.viewed(lambda tokens: tokens.flatten(0, 1))[0]
        if tuple(value.shape[:2]) != (rows, local):
            return value
        own = count(within(forward.layout.tokens, 0, length))
        return shared(value[:, :own].flatten(0, 1), owners)


def _take_recipes(kwargs: dict[str, Any]) -> list[MaskRecipe | None]:
    """Replaces masks that were made outside the text model by the padding mask. Returns their recipes, for layers
    without a window and with one."""
    mask = kwargs.get("attention_mask")
    of_kinds = mask if isinstance(mask, dict) else dict.fromkeys(_KINDS, mask)
    if of_kinds.keys() - set(_KINDS) or not any(isinstance(each, MaskRecipe) for each in of_kinds.values()):
        return [None, None]
    found = [of_kinds.get(kind) for kind in _KINDS]
    kwargs["attention_mask"] = next(recipe.padding for recipe in found if recipe is not None)
    return found


def _own_features(value: Any, batch: dict[str, Any], owners: Owners) -> list[Tensor] | None:
    """Returns this rank's part of features of masked tokens, a list of [n, K] by layer; None for any other
    value."""
    are_tensors = isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value)
    if not are_tensors or any(each.dim() != 2 for each in value):
        return None
    others = [mask for name, mask in batch.items() if isinstance(mask, Tensor) and name != "attention_mask"]
    masks = [mask for mask in others if mask.dtype == torch.bool and mask.shape == owners.shape]
    if len(masks) != 1:
        return None
    masked, _ = owners.viewed(lambda tokens: tokens[masks[0]], masks[0].device)  # waits for the device
    return [masked.own(each) for each in value] if {*map(len, value)} == {*masked.shape} else None


def _row_by_row(kwargs: dict[str, Any], is_alone: bool) -> str | None:
    """Returns the argument that makes a text model run as it is: a cache, and in a single process also a request for
    outputs that it has only row by row. None if there is no such argument."""
    if cache_in(kwargs) is not None:
        return "a cache was given"
    return next((f"{name}=True" for name in ("use_cache", "output_attentions") if is_alone and kwargs.get(name)), None)


def _has_tokens(name: str, value: Any, rows: int, length: int) -> bool:
    """Returns whether an argument has a dimension of tokens that is not known, and so cannot be cut."""
    tensors = [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    unknown = [each for each in tensors if sequence_dim(name, each, rows, length) is None]
    return any(length in each.shape or name == "attention_mask" for each in unknown)

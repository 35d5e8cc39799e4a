"""Distributes the images of whole batches over ranks: each rank of a group encodes some of them, and all ranks gather
the features.

    arguments of all images ── those of this rank's ── vision tower ── its features ── all-gather ── features of all

Two kinds of arguments are supported: images of one size [N, ...], and the patches [P, K] of images (or videos) of any
sizes with a grid [N, 3], whose row products count each image's patches. Every rank encodes all images if there are
fewer than ranks, if it is not known of the model's code that images are independent (`_LISTED`), or if its towers have
hooks or modules of a user's, or draw random numbers.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from seqtile.ops.state import exchanged
from seqtile.sp.groups import SequenceParallel, add_up, device_of
from seqtile.sp.owners import Owners, gathered, with_whole_gradient
from seqtile.sp.token_shard import shared

if TYPE_CHECKING:
    from seqtile.sp.whole_batches import WholeBatches

_LISTED = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "llava", "internvl", "gemma3", "paligemma")
"""transformers' model types of which tests prove that features of an image depend on no other image."""
_LIBRARIES = {"torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "torchao", "seqtile"}
"""Packages whose modules and hooks compute each image by itself."""
_OF_MORE = (nn.modules.batchnorm._BatchNorm, nn.RNNBase)
"""PyTorch's modules that may compute one image from others."""
_FUNCTIONS = ("get_image_features", "get_video_features")
_SELDOM_READ = ("last_hidden_state", "hidden_states", "attentions")
"""Fields that are rarely read: gathered only when they are. Of the others a list has a tensor for each image, not for
each layer."""


class Images:
    """The images in a function's arguments, and the rank that encodes each of them."""

    def __init__(self, arguments: tuple[tuple, dict], sizes: list[int], sp_group: SequenceParallel):
        self.arguments, self.sizes, self.sp_group = arguments, sizes, sp_group
        """`sizes`: the number of rows of each image in the pixels' argument."""
        loads, ranks = [0] * sp_group.size, [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            ranks[i] = min(range(sp_group.size), key=loads.__getitem__)
            loads[ranks[i]] += sizes[i]
        self.of_images = Owners.of_ranks(torch.tensor(ranks), sp_group)
        self.own_sizes = [size for size, rank in zip(sizes, ranks, strict=True) if rank == sp_group.rank]

    @classmethod
    def of(cls, arguments: tuple[tuple, dict], sp_group: SequenceParallel) -> "Images | None":
        """Returns the images in a function's arguments; None if their kind is unknown, or if there are fewer than
        ranks."""
        tensors = [each for each in tree_flatten(arguments)[0] if isinstance(each, Tensor) and each.dim()]
        pixels = [each for each in tensors if each.is_floating_point() and not each.requires_grad]
        grids = [each for each in tensors if not each.is_floating_point() and each.dim() == 2 and each.shape[1] == 3]
        if len(pixels) != 1 or len(grids) > 1 or len(pixels + grids) != len(tensors):
            return None
        sizes = grids[0].prod(1).tolist() if grids else [1] * len(pixels[0])
        if not 1 < sp_group.size <= len(sizes) or sum(sizes) != len(pixels[0]) or not all(sizes):
            return None
        return cls(arguments, sizes, sp_group)

    def owners(self, share: Fraction) -> Owners:
        """Returns the owners of features that have `share` rows per row of an image."""
        ranks = self.of_images.ranks.repeat_interleave(torch.tensor(self.counts(share)))
        return Owners.of_ranks(ranks, self.sp_group)

    def counts(self, share: Fraction) -> list[int]:
        return [int(share * size) for size in self.sizes]

    def own(self) -> tuple[tuple, dict]:
        """Returns the arguments of this rank's images."""

        def part(values: Tensor) -> Tensor:
            if not values.dim():
                return values
            return (self.owners(Fraction(1)) if values.is_floating_point() else self.of_images).own(values)

        return tree_map_only(Tensor, part, self.arguments)


class DealtImages:
    """Replaces a model's functions that encode images. In a forward that is cut over ranks, distributes the images."""

    def __init__(self, batches: "WholeBatches"):
        self.batches, self.sharding = batches, batches.sharding
        self.is_encoding = False
        for module in self.sharding.outer.modules():
            for name in _FUNCTIONS:
                if hasattr(type(module), name) and name not in vars(module):
                    setattr(module, name, partial(self, module, name))

    def remove(self) -> None:
        for module in self.sharding.outer.modules():
            for name in _FUNCTIONS:
                if getattr(vars(module).get(name), "func", None) is self:
                    delattr(module, name)

    def __call__(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        encode, sp_group = partial(getattr(type(module), name), module), self.sharding.sp_group
        is_cut = self.sharding.forward.batch_hash is not None and not self.is_encoding
        images = Images.of((args, kwargs), sp_group) if is_cut and _is_listed(module) else None
        if images is None:
            return encode(*args, **kwargs)
        with exchanged([(vars(self), "is_encoding", True)]):
            self.batches.compare_batch()
            unknown = any(map(_is_unknown, _towers(module.base_model, self.sharding.model)))
            if add_up(torch.tensor(int(unknown), device=device_of(sp_group)), sp_group):  # on any rank
                return encode(*args, **kwargs)
            args, kwargs = images.own()
            return _of_all(encode(*args, **kwargs), images)


def _is_listed(module: nn.Module) -> bool:
    """Returns whether a model's code is Hugging Face's of a listed type. FSDP2 gives a model another class."""
    home = next(kind.__module__ for kind in type(module).__mro__ if not kind.__module__.startswith("torch."))
    return home in [f"transformers.models.{name}.modeling_{name}" for name in _LISTED]


def _towers(model: nn.Module, text_model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of a model that neither are in its text model nor contain it."""
    text = set(text_model.modules())
    return (module for module in model.modules() if text.isdisjoint(module.modules()))


def _is_unknown(module: nn.Module) -> bool:
    """Returns whether a module is of no known library, calls code that is not, or draws random numbers."""
    rates = [value for name, value in vars(module).items() if name == "p" or "drop" in name]
    if module.training and any(isinstance(rate, float) and rate > 0 for rate in rates):
        return True
    if isinstance(module, _OF_MORE) or type(module).__name__ in ("Linear8bitLt", "Float8Linear"):
        return True
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    homes = [type(module).__module__, *map(_home_of, (module.forward, *hooks))]
    return any(home.split(".")[0] not in _LIBRARIES for home in homes)


def _home_of(function: Callable) -> str:
    """Returns the name of the module in which a function is written."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def _is_list(value: Any, count: int) -> bool:
    """Returns whether a value is a list with the features [n, ...] of `count` images."""
    are_tensors = isinstance(value, list | tuple) and all(isinstance(each, Tensor) and each.dim() for each in value)
    return are_tensors and len(value) == count and len({each.shape[1:] for each in value}) == 1


def _share(leaf: Any, sizes: list[int]) -> Fraction | None:
    """Returns a leaf's rows per row of an image; None if that differs between images, or if the leaf has no rows."""
    counts = [len(each) for each in leaf] if _is_list(leaf, len(sizes)) else None
    if counts is None and not isinstance(leaf, Tensor):
        return None
    share = Fraction(sum(counts or [len(leaf)]), sum(sizes))
    of_images = [share * size for size in sizes]
    is_even = share and all(each.denominator == 1 for each in of_images) and counts in (None, of_images)
    return share if is_even else None


def _rows(leaf: Tensor | list[Tensor]) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.cat(tuple(leaf))


def _of_all(output: Any, images: Images) -> Any:
    """Returns the output for this rank's images with the features of all images. One all-gather, and one all-reduce in
    the backward."""
    flat: dict[str, tuple[list, Any]] = {}
    together: dict[tuple, list[tuple[list, int]]] = {}
    for name, value in output.items():
        count = 0 if name in _SELDOM_READ else len(images.own_sizes)
        leaves, _ = flat[name] = tree_flatten(value, is_leaf=partial(_is_list, count=count))
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            if (share := _share(leaf, images.own_sizes)) is None:
                raise ValueError(
                    f"{name} of {len(images.own_sizes)} images is no tensor with equally many rows for each of their "
                    f"{sum(images.own_sizes)}, as expected of this model type; leave this model whole: "
                    "sp.restore(model)"
                )
            if name in _SELDOM_READ:
                leaves[i] = shared(leaf, images.owners(share))
            else:
                together.setdefault((share, _rows(leaf).dtype), []).append((leaves, i))
    for (share, _), places in together.items():
        own = [_rows(leaves[i]) for leaves, i in places]
        rows = torch.cat([each.flatten(1) for each in own], 1)
        whole = with_whole_gradient(gathered(rows, images.owners(share)), images.sp_group)
        parts = whole.split([each[0].numel() for each in own], 1)
        for (leaves, i), part, like in zip(places, parts, own, strict=True):
            found = part.reshape(-1, *like.shape[1:])
            leaves[i] = found if isinstance(leaves[i], Tensor) else type(leaves[i])(found.split(images.counts(share)))
    for name, (leaves, spec) in flat.items():
        output[name] = tree_unflatten(leaves, spec)
    return output

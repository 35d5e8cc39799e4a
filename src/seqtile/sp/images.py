"""Distributes the images of whole batches over ranks: each rank of a group encodes some of them, and all ranks gather
the features.

    arguments of all images ── those of this rank's ── vision tower ── its features ── all-gather ── features of all

Two kinds of arguments are supported: images of one size [N, ...], and the patches [P, K] of images (or videos) of any
sizes with a grid [N, 3], whose row products count each image's patches. Everything else is tested: every rank encodes
the first batch whole, then its own images alone, then its own images among changed ones. If the features differ, or if
there are fewer images than ranks, every rank encodes all images.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from seqtile.ops.state import WatchedTensor, autocast_on, default_generators, equal
from seqtile.sp.groups import SequenceParallel, add_up, device_of
from seqtile.sp.owners import Owners, gathered, with_whole_gradient
from seqtile.sp.token_shard import shared

_FUNCTIONS = ("get_image_features", "get_video_features")
_SELDOM_READ = ("last_hidden_state", "hidden_states")  # fields that are rarely read: gathered only when they are


class Batches(Protocol):
    """The sharding hooks, as far as images need them."""

    sp_group: SequenceParallel
    batch_hash: Tensor | None

    def compare_batch(self) -> None:
        """Raises ValueError on every rank if the ranks of the group have different batches."""


class Images:
    """The images in a function's arguments, and the rank that encodes each of them."""

    def __init__(self, arguments: tuple[tuple, dict], sizes: list[int], sp_group: SequenceParallel):
        self.arguments, self.sizes, self.sp_group = arguments, sizes, sp_group
        """`sizes`: the number of rows of each image in the pixels' argument."""
        loads, ranks = [0] * sp_group.size, [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            ranks[i] = min(range(sp_group.size), key=loads.__getitem__)
            loads[ranks[i]] += sizes[i]
        self.of_images = Owners(torch.tensor(ranks, dtype=torch.int16), sp_group)
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
        return Owners(self.of_images.ranks.repeat_interleave(torch.tensor(self.counts(share))), self.sp_group)

    def counts(self, share: Fraction) -> list[int]:
        return [int(share * size) for size in self.sizes]

    def own(self) -> tuple[tuple, dict]:
        """Returns the arguments of this rank's images."""

        def part(values: Tensor) -> Tensor:
            if not values.dim():
                return values
            return (self.owners(Fraction(1)) if values.is_floating_point() else self.of_images).own(values)

        return tree_map_only(Tensor, part, self.arguments)

    def with_others_changed(self) -> tuple[tuple, dict]:
        """Returns arguments with this rank's images and changed values of all others."""
        mine = self.owners(Fraction(1)).ranks == self.sp_group.rank

        def changed(values: Tensor) -> Tensor:
            if not values.dim() or not values.is_floating_point():
                return values
            return values.where(mine.to(values.device).view(-1, *[1] * (values.dim() - 1)), 0.5 - values)

        return tree_map_only(Tensor, changed, self.arguments)


class Features(NamedTuple):
    """The structure of one value that a function returns for images."""

    spec: TreeSpec
    """The pytree of the value. Its leaves are tensors [n, ...] of all images, or lists with one tensor per image."""
    shares: list[Fraction]
    """For each leaf, its rows per row of an image in the pixels' argument; 0 for None."""

    def leaves(self, value: Any) -> list[Tensor | list[Tensor]]:
        return self.spec.flatten_up_to(value)


class DealtImages:
    """Replaces a model's functions that encode images. In a forward that is cut over ranks, distributes the images."""

    def __init__(self, model: nn.Module, batches: Batches):
        self.model, self.batches = model, batches
        self.known: dict[str, dict[str, Features] | None] = {}
        """The features of each kind of call, see `_kind`; None if every rank encodes all images."""
        self.is_encoding = False
        for module in model.modules():
            for name in _FUNCTIONS:
                if hasattr(type(module), name) and name not in vars(module):
                    setattr(module, name, partial(self, module, name))

    def remove(self) -> None:
        for module in self.model.modules():
            for name in _FUNCTIONS:
                if getattr(vars(module).get(name), "func", None) is self:
                    delattr(module, name)

    def __call__(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        encode, sp_group = partial(getattr(type(module), name), module), self.batches.sp_group
        is_cut = self.batches.batch_hash is not None and not self.is_encoding
        images = Images.of((args, kwargs), sp_group) if is_cut else None
        if images is None:
            return encode(*args, **kwargs)
        self.is_encoding = True
        try:
            kind = _kind(module, name, images)
            self.batches.compare_batch()
            if kind not in self.known:
                found, self.known[kind] = _proven(encode, images, module)
                return found
            if (known := self.known[kind]) is None:
                return encode(*args, **kwargs)
            args, kwargs = images.own()
            return _of_all(encode(*args, **kwargs), images, known)
        finally:
            self.is_encoding = False


def _kind(module: nn.Module, name: str, images: Images) -> str:
    """Returns the kind of a call. Calls of one kind share the result of the test."""
    leaves, spec = tree_flatten(images.arguments)
    about = [(each.shape[1:], each.dtype) if isinstance(each, Tensor) else _setting(each) for each in leaves]
    return repr((type(module), name, module.training, spec, about))


def _setting(value: Any) -> Any:
    return value if isinstance(value, bool | str) else type(value)  # numbers may depend on the batch


def _is_list(value: Any, count: int) -> bool:
    """Returns whether a value is a list with the features [n, ...] of `count` images."""
    are_tensors = isinstance(value, list | tuple) and all(isinstance(each, Tensor) and each.dim() for each in value)
    return are_tensors and len(value) == count and len({each.shape[1:] for each in value}) == 1


def _features(output: Any, sizes: list[int]) -> dict[str, Features] | None:
    """Returns the features in a function's output, by name, for images of these sizes; None if the output contains
    anything else."""
    if not isinstance(output, Mapping):
        return None
    found: dict[str, Features] = {}
    for name, value in output.items():
        leaves, spec = tree_flatten(value, is_leaf=lambda each: _is_list(each, len(sizes)))
        shares = [_share(leaf, sizes) for leaf in leaves]
        if None in shares:
            return None
        found[name] = Features(spec, shares)
    return found or None


def _share(leaf: Any, sizes: list[int]) -> Fraction | None:
    """Returns a leaf's rows per row of an image (0 for None), or None if that differs between images."""
    if leaf is None:
        return Fraction(0)
    if not isinstance(leaf, Tensor) and not _is_list(leaf, len(sizes)):
        return None
    counts = [len(each) for each in leaf] if not isinstance(leaf, Tensor) else None
    share = Fraction(sum(counts) if counts else len(leaf), sum(sizes))
    of_images = [share * size for size in sizes]
    is_whole = share and all(each.denominator == 1 for each in of_images)
    return share if is_whole and counts in (None, of_images) else None


def _rows(leaf: Tensor | list[Tensor]) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.cat(tuple(leaf))


def _proven(encode: Callable, images: Images, module: nn.Module) -> tuple[Any, dict[str, Features] | None]:
    """Returns a function's output for all images, and its features if images are independent on every rank, else None.

    A rank's images are independent if their features stay bitwise equal when all other images change, and equal up to
    rounding when they are encoded alone. A function that draws random numbers or changes buffers, such as batch
    statistics, is not tested and counts as dependent. One small all-reduce.
    """
    (args, kwargs), device = images.arguments, next(module.parameters()).device
    generators, buffers = default_generators(device), [WatchedTensor(*each) for each in module.named_buffers()]
    found = encode(*args, **kwargs)
    known = _features(found, images.sizes)
    if known is None or any(each.drawn for each in generators) or any(each.changed for each in buffers):
        return found, None
    try:
        is_same = _is_independent(encode, images, found, known)
    except Exception:  # some images may not be encodable alone
        is_same = False
    wrong = add_up(torch.tensor(int(not is_same), device=device_of(images.sp_group)), images.sp_group)
    return found, None if wrong else known


@torch.no_grad()
def _is_independent(encode: Callable, images: Images, found: Any, known: dict[str, Features]) -> bool:
    """Returns whether the features `found` of this rank's images depend on no other image."""
    own, others = (encode(*args, **kwargs) for args, kwargs in (images.own(), images.with_others_changed()))
    is_same = own.keys() == known.keys()
    for name, features in known.items():
        of_calls = [features.leaves(each[name]) for each in (found, others, own)]
        for share, *leaves in zip(features.shares, *of_calls, strict=True):
            if share:
                *wholes, part = map(_rows, leaves)
                expected, again = (images.owners(share).own(whole) for whole in wholes)
                is_same &= _share(leaves[-1], images.own_sizes) == share
                is_same &= equal(again, expected) and _is_close(part, expected)
    return is_same


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Returns whether features are equal up to rounding."""
    _, dtype, is_enabled = autocast_on(expected.device)
    dtype = dtype if is_enabled else expected.dtype
    return equal(found.to(dtype), expected.to(dtype), rounded=True)


def _of_all(output: Any, images: Images, known: dict[str, Features]) -> Any:
    """Returns the output for this rank's images with the features of all images. One all-gather, and one all-reduce in
    the backward."""
    flat = {name: features.leaves(output[name]) for name, features in known.items()}
    together: dict[tuple, list[tuple[list, int]]] = {}
    for name, leaves in flat.items():
        for i, (leaf, share) in enumerate(zip(leaves, known[name].shares, strict=True)):
            if _share(leaf, images.own_sizes) != share:
                raise ValueError(
                    f"{name} of {len(images.own_sizes)} images has {len(_rows(leaf))} rows, expected {share} for each "
                    f"of their {sum(images.own_sizes)}, as in batches before; leave this model whole: sp.restore(model)"
                )
            if not share:
                continue
            if name in _SELDOM_READ and isinstance(leaf, Tensor):
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
    for name, leaves in flat.items():
        output[name] = tree_unflatten(leaves, known[name].spec)
    return output

"""What is tiled, by whom, and what another library took back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from seqtile.arch import find_arch
from seqtile.models.causal_lm import check_loss, why_generic_head
from seqtile.models.experts import spread_of
from seqtile.models.layer import check_layer, groups_of, why_called
from seqtile.models.mlp import check_mlp, why_generic
from seqtile.models.notes import is_checkpointed
from seqtile.models.patch import applied_parts, mlps_of, model_type_of, unwrapped
from seqtile.models.placement import current_forward, package_of, placement_at, wrappers_at
from seqtile.ops.tiles import resolve_chunk_tokens

_PASS_ON = ("accelerate", "torch")  # whose wrappers call what they wrap whatever they are given


@dataclass(frozen=True)
class PartStatus:
    """Who computes one part of a model."""

    name: str
    applied: bool
    """Whether seqtile was applied to this part, of this model or of its classes."""
    tiled: int
    total: int
    """How many of its modules run seqtile's forward, of how many."""
    others: tuple[str, ...]
    """The packages whose forwards run on the rest, such as "transformers" or "liger_kernel"."""
    chunk_tokens: tuple[int, ...]
    """Tokens a tile, of each kind of module; empty if nothing is tiled."""
    generic: str | None
    """Why some are called tile by tile (`seqtile.tiled`) instead of having their weights read, if some are."""
    problem: str | None
    """Why the tiled forward will refuse to run, if it will."""
    head_groups: int | None = None
    """How many groups of heads attend one after the other; None if all do at once."""
    wrappers: tuple[str, ...] = ()
    """The packages whose forwards stand around seqtile's and decide at every call whether to call it."""

    def __str__(self) -> str:
        if self.tiled:
            text = f"seqtile, {' or '.join(map(str, self.chunk_tokens))} tokens a tile"
            if self.total > 1:
                text += f", {self.tiled} of {self.total} layers"
            if self.head_groups:
                text += f", attention by {self.head_groups} groups of heads"
            if self.wrappers:
                text += f", where the forward from {', '.join(self.wrappers)} around it calls it"
        else:
            text = f"not tiled: {', '.join(self.others)}"
        if self.applied and self.tiled < self.total:
            takers = [package for package in self.others if package != "transformers"]
            reason = "it was not built of the tiled classes"
            if takers:  # Liger takes a forward back; that of another package is a subclass's own
                liger = takers == ["liger_kernel"]
                reason = "liger_kernel took it back" if liger else f"the forward that runs is from {takers[0]}"
            text += f"; {reason}: apply seqtile to this model, last"
        if self.generic and not self.problem:
            text += f"; called tile by tile, because {self.generic}"
        if self.problem:
            text += f"; REFUSES: {self.problem}"
        return text


@dataclass(frozen=True)
class ModelStatus:
    """The answer of `seqtile.status`; print it."""

    model: str
    loss: PartStatus | None
    """None for a model without a language-model head."""
    mlp: PartStatus
    layer: PartStatus | None = None
    """Everything of a layer but attention; None where that was not asked for. Its tiles take the MLP along."""
    notes: tuple[str, ...] = ()
    """Where what is tiled does nothing, or is not what one may expect."""

    def __str__(self) -> str:
        lines = [self.model]
        parts = (self.loss, self.mlp, self.layer)
        lines += [f"  {part.name:<5} {part}" for part in parts if part is not None]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def status(model: nn.Module) -> ModelStatus:
    """Tells what of `model` is tiled, by whom, and what another library took back.

    Raises ValueError for an unsupported model type, TypeError for something that is no Hugging Face model.
    """
    model = unwrapped(model)
    arch = find_arch(model_type_of(model))
    loss = None
    if isinstance(model, arch.causal_lm):
        loss = part_status("loss", model, [model], check_loss, why_generic_head)
    mlp = part_status("mlp", model, mlps_of(model), check_mlp, why_generic)
    if "layer" not in applied_parts(model):
        return ModelStatus(type(model).__name__, loss, mlp, notes=tuple(notes_on(model, loss, mlp, None)))
    layers = list(model.base_model.layers)

    def check(layer: nn.Module) -> None:
        placement = placement_at(layer)
        check_layer(arch, layer, placement and placement.head_groups)

    layer = part_status("layer", model, layers, check, partial(why_called, arch))
    return ModelStatus(type(model).__name__, loss, mlp, layer, tuple(notes_on(model, loss, mlp, layer)))


def notes_on(model: nn.Module, loss: PartStatus | None, mlp: PartStatus, layer: PartStatus | None) -> Iterator[str]:
    """What a reader of `status` may not expect."""
    if loss is not None and loss.tiled:
        yield "in training the loss is computed without logits, which are None; skip_logits=False asks for them"
    if mlp.tiled:
        tiles = " or ".join(map(str, mlp.chunk_tokens))
        parts = "MLPs and layers" if layer else "MLPs"
        yield f"a sequence of at most {tiles} tokens fits in a tile: its {parts} run untiled"
    if layer is not None and layer.tiled and model.config.use_cache:
        yield "the config asks for a cache: in training none is made; one that is given is filled, heads not in groups"
    if layer is not None and layer.tiled and not is_checkpointed(model):
        yield "activation checkpointing is off, so every layer keeps what its attention saves as well as its input"


def part_status(
    name: str, model: nn.Module, modules: list[nn.Module], check: Callable, why_generic: Callable
) -> PartStatus:
    placements = {module: placement for module in modules if (placement := placement_at(module))}
    others = dict.fromkeys(package_of(current_forward(module)) for module in modules if module not in placements)
    chunk_tokens = {
        resolve_chunk_tokens(placement.chunk_tokens, model.config.hidden_size, spread_of(module, model.config))
        for module, placement in placements.items()
    }
    around = dict.fromkeys(package_of(wrapper) for module in modules for wrapper in wrappers_at(module))
    generic = problem = None
    if placements:
        reasons = (why_generic(module) for module in modules)
        generic = next((reason for reason in reasons if reason is not None), None)
        try:
            for module in modules:
                check(module)
        except ValueError as error:
            problem = str(error)
    grouped = ((module, placement.head_groups) for module, placement in placements.items() if placement.head_groups)
    groups = {groups_of(layer.self_attn, wanted) for layer, wanted in grouped}
    return PartStatus(
        name=name,
        applied=name in applied_parts(model),
        tiled=len(placements),
        total=len(modules),
        others=tuple(others),
        chunk_tokens=tuple(sorted(chunk_tokens)),
        generic=generic,
        problem=problem,
        head_groups=max(groups, default=None),
        wrappers=tuple(package for package in around if package not in _PASS_ON),
    )

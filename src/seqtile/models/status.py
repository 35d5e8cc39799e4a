"""Reports what is tiled in a model, by which package, and what another library took back. The verdicts in forward/
decide it."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from seqtile.attention.layout import VARLEN
from seqtile.limits import flash_limit
from seqtile.models.apply import parts_applied_to, refused_of
from seqtile.models.find import head_of, is_checkpointed
from seqtile.models.forward.layer import groups_of
from seqtile.models.forward.mlp import sparsity_of
from seqtile.models.functions import package_of
from seqtile.models.known import UNKNOWN
from seqtile.models.parts import EXPERTS, LAYER, LOSS, MLP, Part
from seqtile.models.placement import inwards, placement_at, wrappers_at
from seqtile.models.varlen import attention_of, is_varlen
from seqtile.models.verdict import REMEDY
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.protocols import FIRST_STEP, SHARDED
from seqtile.unwrapped import unwrapped

IN_EVALUATION = "the model is in evaluation mode: until model.train() nothing is checkpointed, and no step is compared"
_PASS_ON = ("accelerate", "torch")  # whose wrappers call what they wrap whatever they are given


@dataclass(frozen=True)
class PartStatus:
    """The status of one part of a model: which package computes it."""

    name: str
    """The part, as `apply_seqtile` names it, such as "mlp"."""
    applied: bool
    """True if seqtile was applied to this part, of this model or of its classes."""
    tiled: int
    """The number of its modules that run seqtile's forward."""
    total: int
    """The number of all modules of this part."""
    others: tuple[str, ...]
    """The packages whose forwards run on the rest, such as "transformers" or "liger_kernel"."""
    chunk_tokens: tuple[int, ...]
    """Tokens a chunk in training outside autocast, of each kind of module; empty if nothing is tiled."""
    fused: int
    """Of these, the number computed from their weights."""
    chunked: int
    """Of these, the number that run in chunks (`seqtile.tiled`); what is neither runs untiled, as it was."""
    reason: str | None
    """Why some run in chunks, if some do."""
    untiled_reason: str | None
    """Why some run untiled, if some do: what in them is neither known nor declared by `seqtile.tokenwise`."""
    problem: str | None
    """Why the tiled forward will refuse to run, if it will."""
    refused: int = 0
    """The number of modules that are left untiled for the reasons that a model's notes give."""
    head_groups: int | None = None
    """The number of head chunks whose attention runs one after the other; None for all heads at once."""
    wrappers: tuple[str, ...] = ()
    """The packages whose forwards stand around seqtile's and decide at every call whether to call it."""
    untiled_tokens: tuple[int, ...] = ()
    """For each kind of module, up to how many tokens a batch runs untiled. Of fused layers less than `chunk_tokens`."""

    def __str__(self) -> str:
        left = self.tiled - self.fused - self.chunked
        if self.tiled and left == self.tiled and self.untiled_reason and not self.problem:
            return f"untiled: {self.untiled_reason}"
        if self.tiled:
            text = f"seqtile, {' or '.join(map(str, self.chunk_tokens))} tokens a chunk"
            if self.fused:
                text += ", fused" if self.total == 1 else f", {self.fused} of {self.total} fused"
            if self.head_groups:
                text += f", attention in {self.head_groups} head chunks"
            if self.wrappers:
                text += f", inside a forward of {', '.join(self.wrappers)}, which decides whether it runs"
        elif self.others == ("trl",):
            text = _of_trl()
        elif not self.total:
            text = "not tiled; this model has none of a known structure"
        else:
            text = f"not tiled; the forward that runs is from {', '.join(self.others)}"
        if self.refused:
            text += f"; {self.refused} of {self.total} left untiled, see the notes"
        if self.applied and self.tiled + self.refused < self.total and self.others != ("trl",):
            takers = [package for package in self.others if package != "transformers"]
            reason = "it was not built of the tiled classes"
            if takers:  # Liger takes a forward back; that of another package is a subclass's own
                liger = takers == ["liger_kernel"]
                reason = "liger_kernel took it back" if liger else f"{takers[0]} has a forward of its own"
            text += f"; {reason}: apply seqtile to this model, last"
        ways = ((self.chunked, "in chunks", self.reason), (left, "untiled", self.untiled_reason))
        for count, how, reason in ways if self.problem is None else ():
            if count and reason:
                text += f"; {'' if self.total == 1 else f'{count} of {self.total} '}{how}: {reason}"
        if self.problem:
            text += f"; REFUSES: {self.problem}"
        return text


@dataclass(frozen=True)
class PrefixStatus:
    """The prefixes that rows of a batch share, see `seqtile.share_prefixes`."""

    min_tokens: int
    """The fewest tokens of a prefix that is computed once."""
    batch_tokens: int
    """The tokens of the last batch, with padding; 0 before the first."""
    saved_tokens: int
    """How many of them were reused: computed once, for several rows."""
    reason: str | None = None
    """Why none was reused, if none was."""

    def __str__(self) -> str:
        text = f"shared prefixes of at least {self.min_tokens} tokens are computed once"
        if self.batch_tokens:
            text += f"; in the last batch {self.saved_tokens:,} of {self.batch_tokens:,} tokens were reused"
            text += f": {self.reason}" if self.reason else ""
        return text


@dataclass(frozen=True)
class ModelStatus:
    """The answer of `seqtile.status`; print it."""

    model: str
    """The name of the model's class."""
    loss: PartStatus | None
    """The loss with the head; None for a model without a language-model head."""
    mlp: PartStatus
    """The MLPs, and the experts of a mixture."""
    layer: PartStatus | None = None
    """Everything in a layer except attention; None if not requested. Its chunks include the MLP."""
    attention: str | None = None
    """The name of the attention in whose place one without masks computes; None if it was not requested."""
    prefixes: PrefixStatus | None = None
    """The prefixes that rows share; None if not requested."""
    notes: tuple[str, ...] = ()
    """Where tiling has no effect, or an unexpected one."""

    def __str__(self) -> str:
        lines = [self.model]
        parts = (self.loss, self.mlp, self.layer)
        lines += [f"  {part.name:<5} {part}" for part in parts if part is not None]
        if self.attention is not None:
            lines.append(f"  attention  without masks of length x length, in the place of {self.attention}")
        lines += [] if self.prefixes is None else [f"  rows  {self.prefixes}"]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def status(model: nn.Module) -> ModelStatus:
    """Tells what is tiled in `model`, by which package, and what another library took back.

    Raises TypeError for anything but a Hugging Face model.
    """
    model = unwrapped(model)
    loss = part_status(model, LOSS) if head_of(model) is not None else None
    mlp = part_status(model, MLP, EXPERTS)
    layer = part_status(model, LAYER) if "layer" in parts_applied_to(model) else None
    sharded = vars(model).get(SHARDED)
    shared = None if sharded is None else sharded.shared_prefixes
    prefixes = None if shared is None else PrefixStatus(*shared)
    attention = attention_of(model).removeprefix(VARLEN) if is_varlen(model) else None
    notes = tuple(notes_on(model, loss, mlp, layer))
    return ModelStatus(type(model).__name__, loss, mlp, layer, attention, prefixes, notes)


def notes_on(model: nn.Module, loss: PartStatus | None, mlp: PartStatus, layer: PartStatus | None) -> Iterator[str]:
    """Yields notes on what a reader of `status` may not expect."""
    if (outcome := outcome_of(model)) is not None:
        yield f"the first training step: {outcome}"
    sharded = vars(model).get(SHARDED)
    groups = (layer and layer.head_groups) or 1
    if sharded is not None and (sharing := sharded.describe_ranks(groups)) is not None:
        yield sharing
    if not model.training and is_checkpointed(model):
        yield IN_EVALUATION
    for name, reason in refused_of(model).items():
        yield f"{name} is left untiled: {reason}"
    if any(UNKNOWN in ((part and part.untiled_reason) or "") for part in (loss, mlp, layer)):
        yield f"seqtile leaves a part untiled if it holds something that is neither known nor declared: {REMEDY}"
    if loss is not None and loss.untiled_reason:
        vocab, width = model.config.get_text_config().vocab_size, model.dtype.itemsize
        yield f"an untiled head makes logits of {vocab * width:,} bytes a token, and its loss {vocab * 4:,} in float32"
    elif loss is not None and loss.tiled:
        yield "the loss is computed without logits; outputs.logits is computed when it is read"
    if mlp.tiled:
        lengths = " or ".join(map(str, (layer if layer and layer.tiled else mlp).untiled_tokens))
        parts = "MLPs and layers" if layer else "MLPs"
        yield f"batches of up to {lengths} tokens run their {parts} untiled, as without seqtile"
    is_cacheless = any(part is not None and part.tiled for part in (loss, layer))
    if is_cacheless and getattr(model.config.get_text_config(), "use_cache", False):
        given = "" if layer is not None and layer.tiled else ", given labels,"
        yield (
            f"a training step{given} makes no cache of keys and values, although the config says use_cache=True; so "
            "packed documents are told apart by their position_ids. Pass a cache if you want one"
        )
    if layer is not None and layer.tiled and not is_checkpointed(model):
        yield "activation checkpointing is off, so every layer keeps what its attention saves as well as its input"
    if _is_on_gpu(model):
        yield from _on_kernels(model, groups)


def outcome_of(model: nn.Module) -> str | None:
    """Returns what came of the first step's comparison, of the model or, where it could not be compared, of that below
    its head; None if there was none yet."""
    models = [each for each in (model, model.base_model) if FIRST_STEP in vars(each)]
    models.sort(key=lambda each: not vars(each)[FIRST_STEP].compared)
    return vars(models[0])[FIRST_STEP].said(models[0]) if models else None


def _is_on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def _on_kernels(model: nn.Module, groups: int) -> Iterator[str]:
    """Yields what its attention's kernels compute wrongly in the installed releases, where it can be reached."""
    config, sharded, dtype = model.config.get_text_config(), vars(model).get(SHARDED), str(model.dtype)[6:]
    heads, head_dim = (getattr(config, name, None) for name in ("num_attention_heads", "head_dim"))
    if isinstance(heads, int) and dtype != "float32":  # in which sdpa takes another kernel
        kv_heads, attention = getattr(config, "num_key_value_heads", None) or heads, attention_of(model)
        ranks = 1 if sharded is None else sharded.sp_group.nodes.sharers(heads // groups, kv_heads // groups)
        limit = flash_limit(attention, -(-heads // (groups * ranks)), head_dim or config.hidden_size // heads)
        if limit is not None:
            yield limit[1]


def _of_trl() -> str:
    """Says who computes the loss of a model that a trainer of TRL has wrapped."""
    head = getattr(sys.modules.get("trl.trainer.utils"), "_ChunkedLogProbFunction", None)
    if head is not None and type(head).__module__.startswith("seqtile."):
        return "TRL's trainer computes it, by seqtile's loss function (apply_seqtile_to_trl)"
    return "TRL's trainer computes it, by TRL's own loss function; apply_seqtile_to_trl() puts seqtile's there"


def _package_at(module: nn.Module) -> str:
    """Returns the package whose forward computes a module, looking through wrappers that only pass calls on."""
    packages = [package_of(function) for function in inwards(module)]
    return next((package for package in packages if package not in _PASS_ON), packages[0])


def _joined(way: str, reasons: Counter) -> str | None:
    """Joins the reasons why modules are computed in a way; of several gives the number of modules."""
    found = {reason: count for (how, reason), count in reasons.items() if how == way and reason}
    return "; ".join(f"{reason} ({count})" if len(found) > 1 else reason for reason, count in found.items()) or None


def part_status(model: nn.Module, *parts: Part) -> PartStatus:
    """Returns who computes the modules of parts that share an option."""
    config = model.config.get_text_config()
    hidden_size = getattr(config, "hidden_size", None) or getattr(config, "d_model", 0)
    name, part_of = parts[0].option, {module: part for part in parts for module in part.modules(model)}
    placements = {module: placement for module in part_of if (placement := placement_at(module)) and placement.part}
    others = dict.fromkeys(_package_at(module) for module in part_of if module not in placements)
    around = dict.fromkeys(package_of(wrapper) for module in part_of for wrapper in wrappers_at(module))
    ways, reasons, problem, groups, chunk_tokens, untiled = Counter(), Counter(), None, set(), set(), set()
    checkpointed, itemsize, sharded = is_checkpointed(model), model.dtype.itemsize, vars(model).get(SHARDED)
    for module, placement in placements.items():
        verdict, options = part_of[module].verdict(module), placement.options
        ways[verdict.how] += 1
        if verdict.tileable:
            reasons[verdict.how, verdict.reason] += 1
        try:
            part_of[module].check(module, options)
        except ValueError as error:
            problem = problem or str(error)
        sparsity = verdict.sparsity if name == "layer" else sparsity_of(module, config)
        of_module = (sparsity, verdict.mlp_size if checkpointed else 0, itemsize)
        chunk_tokens.add(resolve_chunk_tokens(options.chunk_tokens, hidden_size, *of_module))
        short = name == "layer" and (verdict.how == "fused" or sparsity != 1)
        untiled.add(resolve_chunk_tokens(options.chunk_tokens, hidden_size, *(() if short else of_module)))
        if name == "layer" and options.head_groups:
            groups.add(groups_of(module.self_attn, options.head_groups, sharded.sharers() if sharded else 1))
    return PartStatus(
        name=name,
        applied=name in parts_applied_to(model),
        tiled=len(placements),
        total=len(part_of),
        others=tuple(others),
        chunk_tokens=tuple(sorted(chunk_tokens)),
        untiled_tokens=tuple(sorted(untiled)),
        fused=ways["fused"],
        chunked=ways["chunked"],
        reason=_joined("chunked", reasons),
        untiled_reason=_joined("untiled", reasons),
        problem=problem,
        refused=sum(type(module).__name__ in refused_of(model) for module in part_of if module not in placements),
        head_groups=max((number for number in groups if number), default=None),
        wrappers=tuple(package for package in around if package not in _PASS_ON),
    )

"""The trial of `seqtile check`: a model, made small, tiled part by part, beside itself untiled; and its variants."""

import copy
import re
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from seqtile.memory.measure import FlopCount, LiveBytes
from seqtile.memory.simulate import quiet
from seqtile.models.model_types import model_classes, model_types
from seqtile.models.parts import EXPERTS, LAYER, LOSS
from seqtile.models.placement import Options
from seqtile.proof.findings import Finding, findings, tiled_copy
from seqtile.proof.small import WORDS, small_model
from seqtile.proof.sweep import DIFFERS, FAILS, Row, sweep
from seqtile.recipes import CheckOptions, check_path, hub_config, in_brief
from seqtile.renamed import enable_checkpointing

TOKENS, CHUNK = (2048, 192, 96), 64  # of the measured step: the most that the model takes
OWN_CODE = "brings code of its own, which is not run unasked: read it, and pass --trust-remote-code to seqtile check"
LOOPS = 1.4  # times as many operations for twice as many tokens: it loops over them


EQUAL = " loss and gradients equal the untiled model's up to rounding"


class Cost(NamedTuple):
    """The cost of a training step."""

    flops: int
    peak: int
    """The most bytes alive, gradients included."""
    operations: int


@dataclass(frozen=True)
class Line:
    """The result for the modules of one class."""

    part: str
    """loss, mlp, experts or layer."""
    module: str
    """The name of their class."""
    count: int
    how: str
    """fused, chunked or refused."""
    reason: str | None
    """Why they are not fused."""
    head_groups: bool
    error: float
    """The largest error of the loss or a gradient against float64, relative."""
    untiled_error: float
    flops: float | None
    """FLOP of a training step over the untiled model's, without checkpointing; None if refused."""
    flops_checkpointed: float | None
    """The same with checkpointing of every layer in both; None if refused, or if the model cannot be checkpointed."""
    peak: float | None
    """Peak of live bytes over the untiled model's; None if refused."""


@dataclass(frozen=True)
class Report:
    """The answer of `seqtile check`."""

    model: str
    lines: list[Line]
    untiled: list[str]
    """Layers that stay untiled because of their kind, and why."""
    tokens: int
    """The tokens of the training step whose work and memory were measured."""
    variants: list[Row]
    """The results for other config values and batches, with all parts tiled together."""

    @property
    def differs(self) -> bool:
        refused = any(line.how == "refused" for line in self.lines)
        return refused or any(row.how == DIFFERS for row in self.variants)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        left = [f"{line.part} of {line.module}" for line in self.lines if line.how == "refused"]
        left += [] if any(line.part == LOSS.option for line in self.lines) else ["the loss"]
        left += [f"layers of kind {reason.partition(':')[0]}" for reason in self.untiled]
        text = f"Not tiled: {', '.join(left)}; with any other part tiled," if left else "All parts can be tiled:"
        different = any(row.how == DIFFERS for row in self.variants)
        return f"{text}{EQUAL}{', but not in every variant' * different}."

    def figures(self) -> dict[str, object]:
        return asdict(self) | {"differs": self.differs, "verdict": self.verdict}


def check(asked: CheckOptions) -> Report:
    """Builds the model small, tiles it part by part, and compares. Raises ValueError if it cannot: no
    config, no head over a vocabulary, an encoder, remote code without consent, a model that cannot be built or does not
    run on text alone."""
    model_class, config = class_and_config(asked.model, asked.trust_remote_code)
    what = "cannot be built small"
    with quiet():
        if asked.full:
            model = model_class.from_pretrained(asked.model, dtype=torch.float32)
        try:
            model = model if asked.full else small_model(model_class, config)
            what = "does not run on text alone"
            results = list(findings(model))
            tokens, untiled = _untiled_cost(model)
            checkpointed = _checkpointed_flops(copy.deepcopy(model), tokens)
        except Exception as error:  # of the model's own code, which may raise anything
            raise ValueError(f"{model_class.__name__} {what}: {type(error).__name__}: {error}") from error
        lines = [_line(model, one, tokens, untiled, checkpointed) for one in results]
        variants = list(sweep(model_class, config)) if asked.variants else []
    refusals = ((type(layer).__name__, LAYER.refusal(layer)) for layer in LAYER.modules(model))
    left = dict.fromkeys(f"{kind}: {reason}" for kind, reason in refusals if reason)
    return Report(model_class.__name__, lines, list(left), tokens, variants)


def class_and_config(model: str, trust_remote_code: bool = False) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Returns the config of a path, hub name or model type, and its model class with a head. Raises ValueError if there
    is none, or it is an encoder."""
    config = _config(model, trust_remote_code)
    remote = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if remote and config.model_type not in model_types():
        if not trust_remote_code:
            raise ValueError(f"{model} {OWN_CODE}")
        return get_class_from_dynamic_module(remote, model), config
    classes = model_classes(config.model_type)
    named = re.findall(r"\w+", str(config.architectures))  # a list of names, if all is well
    if encoders := [name for name in named if name.endswith("ForMaskedLM")]:
        expected = f"expected a causal language model, such as {classes[0].__name__}"
        raise ValueError(f"{encoders[0]} is an encoder, whose loss seqtile does not tile; {expected}")
    return next((cls for cls in classes if cls.__name__ in named), classes[0]), config


def _config(model: str, trust_remote_code: bool) -> PreTrainedConfig:
    path = Path(model)
    try:
        if not path.exists() and model in model_types():
            return AutoConfig.for_model(model)
        if path.exists() or model.endswith(".json"):
            check_path("", path, "a config.json, or its directory")
        else:
            hub_config(model, "it is not here")
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:  # of a file that may hold anything
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ValueError(f"{model} {OWN_CODE}") from error
        near = [] if path.exists() else get_close_matches(model, model_types(), 1)
        hint = f"; did you mean {near[0]}?" if near else f": {in_brief(error)}"
        raise ValueError(
            f"{model}: expected a config.json, a directory with one, a name on the hub, or a model type such as llama, "
            f"got none that can be read{hint}"
        ) from error


def _line(model: PreTrainedModel, finding: Finding, tokens: int, untiled: Cost, checkpointed: int | None) -> Line:
    part = "experts" if finding.part is EXPERTS else finding.part.option
    flops = peak = again = None
    if finding.refusal is None:
        options = Options(chunk_tokens=CHUNK, check=False)
        tiled = partial(tiled_copy, model, finding.part, finding.cls, options)
        cost = _cost(tiled(), tokens)
        flops, peak, _ = (ours / theirs if theirs else 1.0 for ours, theirs in zip(cost, untiled, strict=True))
        if checkpointed and (ours := _checkpointed_flops(tiled(), tokens)):
            again = ours / checkpointed
    reason = finding.refusal or finding.chunked
    said = finding.modules, finding.how, reason, finding.groups, finding.error, finding.untiled_error
    return Line(part, finding.cls.__name__, *said, flops, again, peak)


def _untiled_cost(model: PreTrainedModel) -> tuple[int, Cost]:
    """Returns the length of the longest step that the model takes, and what it costs. It is short for a model that
    loops over tokens, as recurrences in PyTorch do: 2,048 of them would take minutes."""
    tokens, *longer = reversed(TOKENS)
    cost = few = _cost(copy.deepcopy(model), tokens)
    for more in longer:
        if cost.operations < LOOPS * few.operations:
            with suppress(Exception):  # of the model's own code: its table of positions may be shorter
                tokens, cost = more, _cost(copy.deepcopy(model), more)
    return tokens, cost


def _cost(model: PreTrainedModel, tokens: int) -> Cost:
    ids = torch.arange(tokens).remainder(WORDS - 10).add(5).unsqueeze(0)
    if type(model)._supports_sdpa:  # attention that keeps no matrix of tokens x tokens
        model.set_attn_implementation("sdpa")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with FlopCount() as flops, LiveBytes() as memory:
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        torch.autograd.grad(loss, weights, allow_unused=True)
    return Cost(flops.total, memory.peak, flops.operations)


def _checkpointed_flops(model: PreTrainedModel, tokens: int) -> int | None:
    """Returns the FLOP of a step with every layer checkpointed; None if the model cannot be."""
    with suppress(Exception):  # of the model's own code
        enable_checkpointing(model)
        return _cost(model, tokens).flops
    return None


def print_report(report: Report, console: Console) -> None:
    in_groups = any(line.head_groups for line in report.lines)
    by_group = [Column("head_groups", min_width=11)] * in_groups
    modules = Column("modules", no_wrap=True, overflow="fold")  # names stay whole
    columns = ["part", modules, "tiled", *by_group, "error\ntiled", "error\nuntiled", "work", "work\nckpt", "peak"]
    table = Table(*columns, box=None, header_style="", padding=(0, 1, 0, 0), pad_edge=False)
    for line in report.lines:
        ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in (line.flops, line.flops_checkpointed, line.peak))
        groups = ["yes" if line.head_groups else ""] * in_groups
        errors = (f"{line.error:.0e}", f"{line.untiled_error:.0e}")
        table.add_row(line.part, f"{line.count} {line.module}", line.how, *groups, *errors, *ratios)
    said = [
        "tiled: fused, computed from the weights; chunked, its own forward run once a chunk; refused, left untiled",
        "error tiled, error untiled: largest relative error of the loss or a gradient against float64",
        f"work, peak: FLOP and peak memory of a step of {report.tokens:,} tokens, divided by the untiled model's,",
        "without checkpointing; work ckpt: the same with checkpointing in both, as long sequences are trained",
    ]
    said += [f"{line.module} is {line.how}: {line.reason}" for line in report.lines if line.reason]
    said += [f"left untiled even with layer=True: {reason}" for reason in report.untiled]
    if any(line.how == "refused" for line in report.lines) or report.untiled:
        said.append("what is refused or left untiled trains as before; nothing is to be done, the rest is tiled")
    if not any(line.part == LOSS.option for line in report.lines):
        said.append("the loss cannot be tiled: no head over a vocabulary")
    if report.variants:
        counts = ", ".join(f"{number} {how}" for how, number in Counter(row.how for row in report.variants).items())
        said.append(f"variants (other values of the config, other batches): {counts}")
    said += [f"{row.variant} is {row.how}: {row.reason}" for row in report.variants if row.reason and row.how != FAILS]
    title = f"{report.model}, a small copy of it, each part tiled by itself"
    console.print(title, table, *said, report.verdict, sep="\n")

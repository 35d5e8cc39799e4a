"""Defines a case and the tools of the probes: small models, and a count of outputs that change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqtile.limits import installed
from seqtile.probe import NOT_INSTALLED, Row

VOCAB, TOKENS = 97, 64
BOUNDARY = 24  # where document 2 starts: not at a shard boundary
WINDOW = 8
Logits = Callable[[dict[str, Tensor]], Tensor]
"""Returns the logits [S, V] of a batch."""
CLOSE = 1e-3  # relative error of a float32 gradient; rounding causes 1e-6


@dataclass(frozen=True)
class Finding:
    right: bool
    figure: str
    wrong: str = "wrong"
    """The verdict if it is not right."""

    def by_contract(self, is_as_said: bool) -> "Finding":
        """If the result is as a guide says, returns the finding with the verdict "by contract" instead of "wrong"."""
        return replace(self, wrong="by contract") if is_as_said else self


@dataclass(frozen=True)
class Case:
    """A probe of one system: what runs, and what it needs."""

    probe: str
    system: str
    package: str
    find: Callable[[], Finding]
    note: str = ""
    gpu: bool = False

    def row(self, verdict: str, figure: str = "", note: str = "") -> Row:
        return Row(self.probe, self.system, self.package, verdict, figure, note or self.note)

    def absent(self) -> Row | None:
        """Returns the row of a case that cannot run here, else None."""
        if not installed(self.package):
            return Row(self.probe, self.system, self.package, NOT_INSTALLED)
        return self.row("needs a GPU") if self.gpu and not torch.cuda.is_available() else None

    def run(self) -> Row:
        torch.manual_seed(0)
        try:
            finding = self.find()
        except (NotImplementedError, ValueError) as error:
            return self.row("refused", note=first_line(error))
        except Exception as error:  # raised by another package: report it and go on
            return self.row("failed", note=first_line(error))
        return self.row("right" if finding.right else finding.wrong, finding.figure)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def small_model(sliding_window: int | None = None) -> nn.Module:
    """Returns a Llama in float32 (a Mistral if there is a window) with one layer and weights that make a sharp softmax.

    All processes get the same model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "sdpa"}
    sizes |= {"use_cache": False}  # Trainer sets it for training
    torch.manual_seed(0)
    if sliding_window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=sliding_window))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.train()


def batch_of(packed: bool = False) -> dict[str, Tensor]:
    """Returns input_ids, labels and position_ids, int64 [1, TOKENS]. A quarter of the labels is masked."""
    ids = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    labels, positions = ids.clone(), torch.arange(TOKENS)[None]
    labels[:, : TOKENS // 4] = -100
    if packed:
        positions = torch.cat([torch.arange(BOUNDARY), torch.arange(TOKENS - BOUNDARY)])[None]
        labels[:, BOUNDARY] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the logits [S, V] of all tokens of a batch, on every rank."""
    return torch.cat([model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits])[0]


def changed(logits: Logits | nn.Module, batch: dict[str, Tensor], beyond: int) -> Finding:
    """Counts the tokens at or after `beyond` whose logits change when token 1 changes."""
    logits = partial(logits_of, logits) if isinstance(logits, nn.Module) else logits
    with torch.no_grad():
        before = logits(dict(batch))
        ids = batch["input_ids"].clone()
        ids[:, 1] = (ids[:, 1] + 1) % VOCAB
        after = logits(batch | {"input_ids": ids})
    differs = (before - after).abs().amax(-1) > 1e-6 * before.abs().max()
    assert differs[1], "the changed token changes nothing at all"
    count = int(differs[beyond:].sum())
    return Finding(count == 0, f"{count} of {TOKENS - beyond}")


def leak(logits: Logits | nn.Module) -> Finding:
    return changed(logits, batch_of(packed=True), BOUNDARY)


def window(logits: Logits | nn.Module, packed: bool = False) -> Finding:
    """For a model of one layer with a window of WINDOW tokens."""
    return changed(logits, batch_of(packed), 1 + WINDOW)


def gradients(model: nn.Module) -> Tensor:
    """Returns all gradients as one vector, with zeros for missing ones."""
    parts = [parameter.grad if parameter.grad is not None else 0 * parameter for parameter in model.parameters()]
    return torch.cat([gradient.detach().flatten() for gradient in parts])


def truth(batch: dict[str, Any], attention: str = "sdpa") -> tuple[Tensor, Tensor]:
    """Returns the loss and the gradients (one vector) that one process computes from the whole batch.

    `attention` is not sdpa if another package has replaced sdpa for the whole process.
    """
    model = small_model()
    model.set_attn_implementation(attention)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


def scale(ours: Tensor, theirs: Tensor) -> Finding:
    """Returns the factor by which a gradient exceeds the true one, and the remaining error."""
    factor = float(ours @ theirs / (theirs @ theirs))
    left = error(ours / factor, theirs)
    return Finding(max(abs(factor - 1), left) < CLOSE, f"x {factor:.2f}" + f", error {left:.0e}" * (left >= CLOSE))


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns |ours - theirs| / |theirs|, in float64."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())

"""The probes that two ranks run over gloo, with one sequence cut in two."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqtile
from seqtile import sp
from seqtile.probe.cases import WINDOW, Case, Finding, batch_of, gradients, leak, scale, small_model, truth, window

RANKS = 2
LABEL = 32  # the first token of the second of two shards
SHIFT = "a shard shifts its own labels: shift before the cut, pass shift_labels"
SCALE = "0.19.8: x 2.00 with ZeRO-0 and -2, x 1.00 with -3; its issue 5248"
REFUSED = "later releases refuse it, says their tutorial"


def one_label() -> dict[str, Tensor]:
    """Returns a batch whose only label is the first token of the second shard. The last token of the first predicts
    it."""
    batch = batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][:, LABEL] = batch["input_ids"][:, LABEL]
    return batch


def label_factor(loss: Callable[[dict[str, Tensor]], Tensor]) -> Finding:
    """Compares `loss(batch)`, the loss of both ranks, with one process. `loss` gets the whole batch."""
    factor = float(loss(one_label()).detach() / truth(one_label(), "eager")[0])
    return Finding(abs(factor - 1) < 1e-5, f"x {factor:.2f}")


# seqtile --------------------------------------------------------------------------------------------------------


def spread(sliding_window: int | None = None) -> nn.Module:
    model = small_model(sliding_window)
    sp.apply_ulysses(model, sp.initialize(RANKS), batches="whole")
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=16, check=False)
    return model


def seqtile_scale() -> Finding:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(spread())
    model(**batch_of()).loss.backward()
    return scale(gradients(model), truth(batch_of())[1])


def seqtile_cases() -> list[Case]:
    return [
        Case("leak", "2 ranks", "seqtile", lambda: leak(spread())),
        Case("window", "2 ranks", "seqtile", lambda: window(spread(WINDOW))),
        Case("window", "2 ranks, packed", "seqtile", lambda: window(spread(WINDOW), packed=True)),
        Case("scale", "2 ranks, DDP", "seqtile", seqtile_scale),
        Case("label", "2 ranks", "seqtile", lambda: label_factor(lambda batch: spread()(**batch).loss)),
        Case("label", "labels cut before the shift", "transformers", cut_before_the_shift, SHIFT),
    ]


def cut_before_the_shift() -> Finding:
    finding = label_factor(cut_by_hand)
    return finding.by_contract(finding.figure == "x 0.00")


def cut_by_hand(batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss of ranks that cut `labels` and let the model's loss shift them."""
    model = small_model()
    rows = slice(dist.get_rank() * LABEL, (dist.get_rank() + 1) * LABEL)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, rows]
    loss = model.loss_function(logits, batch["labels"][:, rows], model.config.vocab_size, num_items_in_batch=1).detach()
    dist.all_reduce(loss)
    return loss


# DeepSpeed ------------------------------------------------------------------------------------------------------


def register() -> None:
    """Registers DeepSpeed's Ulysses. Call it once per process: it replaces sdpa for all models with these heads."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would compile collectives for inference in C++
    deepspeed.init_distributed("gloo")
    sizes = {"sequence_parallel_size": RANKS, "micro_batch_size": 1}
    UlyssesSPAttentionHF.register_with_transformers(small_model(), "sdpa", **sizes)


def groups() -> Any:
    """Returns the module that tells DeepSpeed's loader and engine which ranks share a sequence."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups

    return groups


def deepspeed_shard(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    rank, group = groups().get_sequence_parallel_rank(), groups().get_sequence_parallel_group()
    return next(UlyssesSPDataLoaderAdapter([dict(batch)], rank, group, RANKS, torch.device("cpu")))


def deepspeed_logits(sliding_window: int | None = None) -> Callable[[dict[str, Tensor]], Tensor]:
    model = small_model(sliding_window)

    def logits(batch: dict[str, Tensor]) -> Tensor:
        shard = deepspeed_shard(batch)
        own = model(input_ids=shard["input_ids"], position_ids=shard["position_ids"]).logits.contiguous()
        parts = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=1)[0]

    return logits


def deepspeed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the mean over all labels as DeepSpeed's tutorial computes it: each rank's mean, weighted by its
    labels."""
    from torch.distributed.nn.functional import all_gather

    shard = deepspeed_shard(batch)
    labels, group = shard["shift_labels"], groups().get_sequence_parallel_group()
    logits = model(input_ids=shard["input_ids"], position_ids=shard["position_ids"]).logits
    inner = getattr(model, "module", model)  # the model inside the engine
    mean = inner.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=inner.config.vocab_size)
    means, items = all_gather(mean, group=group), all_gather((labels != -100).sum(), group=group)
    return sum(each.nan_to_num() * count for each, count in zip(means, items, strict=True)) / sum(items)


def deepspeed_scale(stage: int) -> Finding:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model = small_model()
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": RANKS}
    config |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=groups())
    engine.backward(deepspeed_loss(engine, batch_of()))
    gradient = torch.cat([safe_get_full_grad(parameter).flatten() for parameter in model.parameters()])
    engine.destroy()
    return scale(gradient, truth(batch_of(), "eager")[1])


def deepspeed_cases() -> list[Case]:
    """The Ulysses that Accelerate, Trainer and TRL enable with `sp_size`."""
    system = "Ulysses, 2 ranks, sdpa"
    return [
        Case("leak", system, "deepspeed", lambda: leak(deepspeed_logits()), REFUSED),
        Case("window", system, "deepspeed", lambda: window(deepspeed_logits(WINDOW)), REFUSED),
        Case("label", system, "deepspeed", lambda: label_factor(partial(deepspeed_loss, small_model()))),
        *(
            Case("scale", f"{system}, ZeRO-{stage}", "deepspeed", partial(deepspeed_scale, stage), note)
            for stage, note in ((0, SCALE), (2, SCALE), (3, "the stage of its tutorial"))
        ),
    ]

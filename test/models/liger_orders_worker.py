"""The process behind test_liger_orders: it imports, patches nothing, and runs each case in a fork of its own.

liger_orders_worker.py DEVICE: a case is a line of JSON, [function, arguments..., seed]; its answer is a line of JSON,
the traceback or "". On a GPU a case runs in this process itself, which takes one case alone.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

import seqtile
from models.liger_truth import CALLS, CHUNK, LENGTHS, LIGER, SEQTILE, Truth, check_ran, own_forwards, watch

SECONDS = 120  # of a case at most


def order(device: str, arch: str, operations: str, ran: list[str], later_ran: list[str], text: str | None) -> None:
    """`ran` and `text`: of the model that "build" makes; `later_ran`: of one that is built after all."""
    truth = Truth(arch, device)
    operations = operations.split(", ")
    model = stood = None
    for operation in operations:
        if operation == "build":
            model = truth.copy()
        elif operation.endswith(" model"):
            stood = own_forwards(model) if operation == "seqtile model" else stood
            getattr(truth, operation.removesuffix(" model"))(model)
        else:
            getattr(truth, operation)()
    later = truth.copy()
    truth.check(model, ran, text)
    truth.check(later, later_ran, text if "seqtile" in operations else None)

    if ran[:2] != [SEQTILE, SEQTILE]:
        stood = own_forwards(model)
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=False)
    seqtile.apply_seqtile(later, chunk_tokens=CHUNK, check=False)
    truth.check(model, [SEQTILE, SEQTILE, ran[2]], lengths=LENGTHS)
    truth.check(later, [SEQTILE, SEQTILE, LIGER])
    truth.check_eval(model)

    for target in (model, later, None):
        seqtile.restore(target)
    assert own_forwards(model) == (stood or {}) and own_forwards(later) == {}
    truth.check_restored("liger" in operations)
    truth.check(model, [LIGER, ran[2], ran[2]])  # whose norms are Liger's, its MLPs were too


def two(device: str, arch: str, other: str) -> None:
    """Two architectures with Liger's one MLP class: seqtile on one leaves the other as it is."""
    truth, others = Truth(arch, device), Truth(other, device)
    ours, ligers = [SEQTILE, SEQTILE, LIGER], [LIGER, LIGER, LIGER]
    truth.liger()
    others.liger()
    truth.seqtile()
    model, neighbour = truth.copy(), others.copy()
    truth.check(model, ours)
    others.check(neighbour, ligers)
    seqtile.apply_seqtile(neighbour, chunk_tokens=CHUNK, check=False)
    others.check(neighbour, ours, lengths=LENGTHS)
    others.check(others.copy(), ligers)
    others.seqtile()
    tiled = others.copy()
    seqtile.restore(arch)
    truth.check(model, ligers)
    others.check(tiled, ours)
    seqtile.restore()
    others.check(tiled, ligers)
    for restored in (truth, others):
        restored.check_restored(liger_on_classes=True)


def trainer(truth: Truth, model: nn.Module, output: str, **options: object) -> Trainer:
    rows = [{name: batch[name][0].cpu() for name in ("input_ids", "labels")} for batch in truth.batches.values()]
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(rows),  # the loss is a mean over the labels of all
        max_steps=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        prediction_loss_only=True,
        report_to=[],
        use_cpu=truth.device == "cpu",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[-1:])


def train(
    device: str, arch: str, target: str, config: dict[str, bool] | None, ran: list[str], text: str | None
) -> None:
    """Trainer applies Liger to a model that is tiled already, by its classes or alone (`target`)."""
    truth = Truth(arch, device, scale=0.5)  # learning rate 1 must not diverge
    with tempfile.TemporaryDirectory() as output:
        theirs = trainer(truth, truth.model, output)
        losses = [theirs.train().training_loss, theirs.evaluate()["eval_loss"]]
        if target == "classes":
            truth.seqtile()
        model = truth.copy()
        if target == "model":
            truth.seqtile(model)
        ours = trainer(truth, model, output, use_liger_kernel=True, liger_kernel_config=config)
        CALLS.clear()
        found_losses = [ours.train().training_loss]
        check_ran(model, ran, LENGTHS)
        found_losses.append(ours.evaluate()["eval_loss"])
        assert CALLS["loss", ran[0]] == 1, "evaluated without logits"
    for found, expected, allowed in zip(found_losses, losses, (1e-6, 1e-5), strict=True):  # of training, of evaluation
        assert abs(found / expected - 1) <= allowed, f"loss {found}, expected {expected}"
    for name, value in truth.model.named_parameters():
        error = (model.get_parameter(name) - value).norm()
        allowed = 1e-5 * (value - truth.weights[name]).norm() + 2**-23 * value.norm()  # each weight is rounded once
        assert error <= allowed, f"{name}: error {error:.1e}, allowed {allowed:.1e}"

    model.train().load_state_dict(truth.weights)
    truth.check(model, ran, text)
    if ran[0] == LIGER:
        stood = own_forwards(model)
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=False)
        truth.check(model, [SEQTILE, SEQTILE, LIGER], lengths=LENGTHS)
        seqtile.restore(model)
        assert own_forwards(model) == stood


def answer(device: str, case: list) -> str:
    torch.manual_seed(case.pop())
    try:
        {"order": order, "two": two, "train": train}[case[0]](device, *case[1:])
    except BaseException:
        return traceback.format_exc()
    return ""


def main() -> None:
    device = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Trainer prints
    watch()
    for line in sys.stdin:
        child = os.fork() if device == "cpu" else 0
        if child == 0:
            signal.alarm(SECONDS)
            print(json.dumps(answer(device, json.loads(line))), file=answers, flush=True)
            os._exit(0)
        elif code := os.waitpid(child, 0)[1]:
            print(json.dumps(f"the process ended with status {code}"), file=answers, flush=True)


if __name__ == "__main__":
    main()

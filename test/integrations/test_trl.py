"""TRL's trainers with seqtile's head train as with their own: the same losses, metrics and weights."""

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.predicted_times import OperationCounter, Prediction, without_data
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import seqtile
import seqtile.integrations.trl
from seqtile.integrations.trl import _to_be_summed, apply_seqtile_to_trl, restore_trl
from support import trl_trainers
from support.assertions import relative_error
from support.choice import every_value
from support.measure import LiveBytes
from support.tiny import VOCAB, build, gentle
from support.trl_trainers import LENGTHS, token_documents, tokenizer, words

trl = pytest.importorskip("trl")
utils = pytest.importorskip("trl.trainer.utils")
datasets = pytest.importorskip("datasets")
EVERY_DAY = ("llama-sft-packed", "llama-grpo", "gemma2-dpo")
CLOCKS = ("runtime", "per_second", "step_time", "learning_rate", "epoch", "num_input")


@pytest.fixture(autouse=True)
def own_head() -> Iterator[None]:
    yield
    restore_trl()


def pairs() -> Any:
    rows = [{"prompt": words(7), "chosen": words(n // 4), "rejected": words(n // 5)} for n in LENGTHS]
    return datasets.Dataset.from_list(rows)


def judged() -> Any:
    rows = [{"prompt": words(7), "completion": words(n // 4), "label": i % 3 > 0} for i, n in enumerate(LENGTHS)]
    return datasets.Dataset.from_list(rows)


def prompts() -> Any:
    return datasets.Dataset.from_list([{"prompt": words(6)} for _ in LENGTHS])


ONE_STEP = {"max_steps": 1, "gradient_accumulation_steps": 1}
SAMPLED = {"num_generations": 2, "max_completion_length": 9}
CASES = {
    "sft": ("SFT", token_documents, {"completion_only_loss": True}),
    "sft-packed": ("SFT", token_documents, {"packing": True, "max_length": 150, "packing_strategy": "wrapped"}),
    "sft-dft": ("SFT", token_documents, {"loss_type": "dft"}),
    "sft-smoothing": ("SFT", token_documents, {"label_smoothing_factor": 0.1}),
    "dpo": ("DPO", pairs, {"loss_type": ["sigmoid", "sft"]}),
    "kto": ("KTO", judged, {}),
    "grpo": ("GRPO", prompts, {**SAMPLED, "temperature": 0.7, "beta": 0.1}),
    "rloo": ("RLOO", prompts, {**SAMPLED, "beta": 0.1}),
    "distillation": ("Distillation", prompts, {"max_completion_length": 9, "beta": 0.5, "temperature": 0.7}),
}


def trained(name: str, start: Path, documents: Any, output: Path) -> tuple[list[dict[str, float]], dict]:
    """Returns what a trainer of the model saved in `start` logs in three steps, and the change of its weights."""
    kind, _, options = CASES[name]
    model = AutoModelForCausalLM.from_pretrained(start)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    teacher = str(start.with_name("teacher"))
    given = {"teacher_model": AutoModelForCausalLM.from_pretrained(teacher)} if kind == "Distillation" else None
    options = {"learning_rate": 1.0 if kind == "SFT" else 0.01} | options  # rounding must not grow from step to step
    trainer = trl_trainers.trainer(getattr(trl, f"{kind}Trainer"), model, documents, output, given=given, **options)
    torch.manual_seed(1)
    trainer.train()
    if kind == "SFT":
        trainer.evaluate()
    moved = {key: parameter.detach() - before[key] for key, parameter in model.named_parameters()}
    return trainer.state.log_history, moved


def assert_same_log(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs) >= 4
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        undecided = abs(their.get("rewards/margins", 1.0)) < 1e-5  # rewards equal but for rounding, as in a first step
        for name in [name for name in their if not name.endswith(CLOCKS)]:
            if undecided and name == "rewards/accuracies":
                continue
            # These are differences of two log-probabilities of whole sequences, which are in the hundreds.
            size = 10 if name == "kl" or name.startswith("rewards/") else 1
            same = math.isclose(our[name], their[name], rel_tol=1e-5, abs_tol=1e-5 * size)
            assert same or (math.isnan(our[name]) and math.isnan(their[name])), (name, our[name], their[name])


@pytest.mark.full("what a model's head is to be given is the same for every trainer", but=EVERY_DAY)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen3_moe"])
def test_same_training(arch: str, name: str, tmp_path: Path) -> None:
    model, documents = gentle(arch), CASES[name][1]()
    model.save_pretrained(tmp_path / "start")
    tokenizer().save_pretrained(tmp_path / "start")
    build(arch).save_pretrained(tmp_path / "teacher")
    theirs, their_moves = trained(name, tmp_path / "start", documents, tmp_path)
    apply_seqtile_to_trl()
    ours, our_moves = trained(name, tmp_path / "start", documents, tmp_path)
    assert_same_log(ours, theirs)
    whole = [torch.cat([moved.flatten() for moved in moves.values()]) for moves in (our_moves, their_moves)]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    rounding = 1.2e-7 * weights.norm() / whole[1].norm()  # of the weights; the changes are their differences
    assert whole[1].norm() > 0 and relative_error(*whole) <= 3e-5 + rounding


@pytest.mark.full("of each trainer", but=["sft", "grpo"])
@pytest.mark.parametrize("name", ["sft", "sft-packed", "sft-smoothing", "dpo", "kto", "grpo", "rloo", "distillation"])
def test_the_first_step_is_compared(name: str, tmp_path: Path) -> None:
    """TRL computes the loss itself, from the last hidden states of the tiled model."""
    kind, documents, options = CASES[name]
    build("llama").save_pretrained(tmp_path / "start")  # some trainers load a reference from there
    tokenizer().save_pretrained(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=20)
    given = {"teacher_model": build("llama")} if kind == "Distillation" else None
    options = options | ONE_STEP
    trl_trainers.trainer(getattr(trl, f"{kind}Trainer"), model, documents(), tmp_path, given=given, **options).train()
    from_logits = "label_smoothing_factor" in options  # which the model's own forward returns
    said = "the loss and 22 gradients" if from_logits else "the last hidden states and 21 gradients below the head"
    assert f"{said} equal" in str(seqtile.status(model))


class HeadProducts(TorchDispatchMode):
    """Counts the FLOP of products with the vocabulary."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[:2] if name == "mm" else args[1:3]
            if VOCAB in (*left.shape, *right.shape):
                self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("loss_type", "units"), [("nll", 3), ("dft", 4)])
def test_products(loss_type: str, units: int, tmp_path: Path) -> None:
    """Only labelled tokens are computed: 3 u if their losses are summed, 4 u if each has its own factor."""
    apply_seqtile_to_trl()
    model, documents = build("llama"), token_documents()
    options = ONE_STEP | {"loss_type": loss_type, "completion_only_loss": True}
    trainer = trl_trainers.trainer(trl.SFTTrainer, model, documents, tmp_path, **options)
    labels = next(iter(trainer.get_train_dataloader()))["labels"][:, 1:]
    with HeadProducts() as head:
        trainer.train()
    assert 0 < (labels != -100).sum() < labels.numel()
    assert head.flops == units * 2 * int((labels != -100).sum()) * VOCAB * model.config.hidden_size


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation cannot run TRL's kernels, so operations that read and write the same bytes replace them."""
    kernels = import_module("trl.kernels.chunked_logprob")

    def add(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        half = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
        torch.addmm(total, a, b, **half, out=total)

    monkeypatch.setattr(kernels, "_forward_tile", lambda tile, *args, **options: tile.amax())
    monkeypatch.setattr(kernels, "_backward_tile", lambda tile, *args, **options: tile.mul_(1.0))
    monkeypatch.setattr(kernels, "_addmm_fp32", add)


@pytest.mark.full("of four cases", but=every_value)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beside_trls_own(dtype: torch.dtype, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates Llama-3.1-8B's head with 8,192 labelled tokens: predicted H200 time, and bytes other than d_weight."""
    on_a_gpu(monkeypatch)
    tokens, size, vocab = 8192, 4096, 128256

    def step() -> tuple[float, int]:
        with without_data():
            hidden = torch.empty(tokens, size, dtype=dtype).requires_grad_()
            weight = torch.empty(vocab, size, dtype=dtype).requires_grad_(not frozen)
            target = torch.empty(tokens, dtype=torch.int64)
            with OperationCounter() as counter, LiveBytes() as memory:
                arguments = (hidden, weight, None, target, 1.0, 32768, None, 1.0, ("log_probs", "entropy", "is_top1"))
                utils._ChunkedLogProbFunction.apply(*arguments)[0].sum().backward()
        summed_and_rounded = 0 if frozen else weight.numel() * {2: 4 + 2, 4: 4}[dtype.itemsize]
        return Prediction(counter.operations).seconds(), memory.peak - summed_and_rounded

    their_time, their_bytes = step()
    apply_seqtile_to_trl()
    token = _to_be_summed.set(True)
    our_time, our_bytes = step()
    _to_be_summed.reset(token)
    assert our_time <= 0.80 * their_time and our_bytes <= 0.5 * their_bytes


def test_label_smoothing_is_left_to_trl_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(seqtile.integrations.trl.logger, "warning_once", said.append)
    apply_seqtile_to_trl()
    options = ONE_STEP | {"label_smoothing_factor": 0.1}
    trl_trainers.trainer(trl.SFTTrainer, build("llama"), token_documents(), tmp_path, **options).train()
    assert said == ["compute_loss_func and label_smoothing_factor: TRL computes this loss from all logits"]


def test_no_label_at_all() -> None:
    """A batch without labels gives zeros that have a gradient, as in TRL."""
    apply_seqtile_to_trl()
    model = build("llama")
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(3, VOCAB, (2, 9))
    output = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert not output.log_probs.any() and not output.label_mask.any()
    output.log_probs.sum().backward()
    assert not model.lm_head.weight.grad.any()


def patched() -> tuple:
    return utils._ChunkedLogProbFunction, utils._use_triton, trl.SFTTrainer.compute_loss


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "add_fused_lm_head", lambda model, **options: None)
    before = patched()
    with pytest.raises(ValueError, match=r"trl [\d.]+: expected add_fused_lm_head of TRL 1\.16, got others; .*layers"):
        apply_seqtile_to_trl()
    assert before == patched()


def test_restore() -> None:
    before = patched()
    for change in (apply_seqtile_to_trl, restore_trl):
        change()
        change()
        assert (before == patched()) == (change is restore_trl)

"""Every example, at tiny size: it trains as the untiled model does, in one process and over ranks."""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM

from recipes.tiny_pretrained import save_tiny
from seqtile import memory, offload
from support.assertions import relative_error
from support.plain_store import offloaded
from support.pool import Pool
from support.small_example import EXAMPLES, LENGTH, SEQUENCES, figures, on_rank, run, trained_by_grpo

IN_BFLOAT16 = 5e-3  # relative: the effect of another rounding order on a loss and on a gradient's norm
ROOT = EXAMPLES.parent
Figures = list[tuple[float, float]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    found = tmp_path_factory.mktemp("tiny")
    save_tiny(found)
    return str(found)


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def updates() -> Iterator[list]:
    """For every optimizer step inside: each trained parameter's weights before the step, and its gradient."""
    seen = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        seen.append([(p.detach().clone(), p.grad.clone()) for p in held if p.grad is not None])

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def test_each_is_short_and_says_how_to_run() -> None:
    """A sentence or two, the second of which says what it needs, and the command."""
    started = {"eight_gpus": "accelerate launch --config_file examples/accelerate/fsdp2.yaml"}
    for file in EXAMPLES.glob("*.py"):
        *sentences, empty, command = ast.get_docstring(ast.parse(file.read_text())).split("\n")
        assert len(file.read_text().splitlines()) <= 70
        assert 1 <= len(sentences) <= 2 and all(line.endswith(".") for line in sentences) and empty == ""
        assert len(sentences) == 1 or sentences[1].startswith("Needs ")
        start = started.get(file.stem, "torchrun --nproc-per-node 2" if "_sp" in file.stem else "python")
        assert re.fullmatch(rf"{start} examples/{file.stem}\.py \[[A-Z ]+\]", command)


def test_each_that_trains_says_a_rate_and_saves() -> None:
    """Those with adapters also merge them."""
    files = {file.stem: file.read_text() for file in EXAMPLES.glob("*.py")}
    trained = {name: text for name, text in files.items() if "train()" in text}
    assert len(trained) > 10 and files.keys() - trained.keys() == {"plan", "tiled_module"}
    for name, text in trained.items():
        assert re.search(r"\b(lr|learning_rate)=\d", text) and re.search(
            r"save_(model|pretrained|16bit_model)\(", text
        ), name
        assert "LoraConfig" not in text or re.search(r"merge_and_unload\(\).*\n.*save_pretrained", text), name


def test_the_page_of_cases_shows_what_the_examples_do() -> None:
    """Each case's callback stands in its example, as do the rate of the table, and directories that the page names."""
    page = (ROOT / "docs" / "your-case.md").read_text()
    rates = dict(re.findall(r"\| `examples/(\w+)\.py` \|[^|]*\| (\S+) \|", page))
    assert len(rates) == 7
    for section in page.split("\n## ")[1:]:
        if found := re.search(r"examples/(\w+)\.py", section):
            text = (EXAMPLES / f"{found[1]}.py").read_text()
            (callback,) = re.findall(r"callbacks = (\[.*\])", section)
            assert f"callbacks={callback}" in text, (found[1], callback)
            assert f"learning_rate={rates.pop(found[1])}," in text, found[1]
            for directory in re.findall(r"runs/(?!finetune_)\w+/\w+", section):
                assert f'"{directory}"' in text, directory
    assert not rates


def test_pages_name_examples_that_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = re.findall(r"(?<![\w/])examples/(\w+\.py|accelerate/\w+\.yaml)", "".join(p.read_text() for p in pages))
    absent = {name for name in named if not (EXAMPLES / name).exists()}
    assert len(named) > 10 and not absent


def same_figures(ours: Figures, theirs: Figures) -> None:
    """The same number of steps, each with the same loss and gradient norm; the loss falls."""
    assert len(ours) == len(theirs) >= SEQUENCES
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for value, truth in zip(mine, other, strict=True):
            assert abs(value / truth - 1) <= IN_BFLOAT16, f"step {step}: {mine}, untiled {other}"
    assert ours[-1][0] < ours[1][0] and ours[-2][0] < ours[0][0], ours


def assert_saved(output: str, start: str) -> None:
    """All weights of a model are there, and they are others than at the start."""
    saved, found = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    before = AutoModelForCausalLM.from_pretrained(start)
    assert not any(found.values()) and not saved.lm_head.weight.equal(before.lm_head.weight)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["own_loop", "whole_layers"])
def test_trains_as_the_untiled_model_does(name: str, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "enable", lambda model: setattr(model, "pool", offloaded(model)))
    found, first = {}, {}
    for tiled in (False, True):
        torch.manual_seed(0)
        with updates() as seen:
            found[tiled] = run(name, directory, tiled=tiled, LENGTH=LENGTH)
        first[tiled] = seen[0]
    same_figures(figures(found[True]), figures(found[False]))
    for (before, gradient), (same, mine) in zip(first[False], first[True], strict=True):
        assert same.equal(before), "the first step begins with the same weights"
        assert gradient.norm() == mine.norm() == 0 or relative_error(mine, gradient) <= 10 * IN_BFLOAT16
    assert_saved(f"runs/{name}", directory)
    status = found[True]["status"]
    assert found[False]["status"].mlp.tiled == 0
    assert (status.loss.tiled, status.mlp.tiled, status.mlp.chunk_tokens) == (1, 2, (50,))
    if name == "whole_layers":
        assert status.layer.tiled == 2
        assert found[True]["model"].pool.total == LENGTH * 48 * 4, "the input of the first of two layers"


def test_whole_layers_without_a_gpu(directory: str) -> None:
    """The real `offload.enable`: a warning, and checkpointed layers."""
    with pytest.warns(UserWarning, match="the model is on cpu: what its checkpoints save stays there"):
        model = run("whole_layers", directory, LENGTH=LENGTH)["model"]
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_tiled_module() -> None:
    names = run("tiled_module", "3000")
    module, x = names["module"].double(), names["x"].detach().double().requires_grad_()
    truth = torch.autograd.grad(module(x).square().mean(), (x, *module.parameters()))
    assert x.shape == (1, 3000, 256) and len(truth) == 6
    for mine, true in zip(names["ours"], truth, strict=True):
        assert relative_error(mine, true) <= 1e-5
    assert names["error"] <= 1e-5 and f"{names['error']:.1e}" in names["printed"]


def test_policy_gradient(directory: str) -> None:
    """The last step's gradient equals that of Hugging Face's logits up to the end of each answer."""
    with updates() as seen:
        names = run("policy_gradient", directory, GROUP=8, LENGTH=24)
    assert len(seen) == 8 == names["printed"].count("reward")
    assert_saved("runs/policy_gradient", directory)
    untiled = AutoModelForCausalLM.from_pretrained(directory).train()
    with torch.no_grad():
        for parameter, (before, _) in zip(untiled.parameters(), seen[-1], strict=True):
            parameter.copy_(before)
    start, target = names["prompt"].shape[1], names["ids"][:, names["prompt"].shape[1] :]
    log_probs = untiled(names["ids"], use_cache=False).logits[:, start - 1 : -1].log_softmax(-1)
    log_probs = log_probs.gather(-1, target[..., None])[..., 0]
    total, tokens = 0, 0
    for advantage, row, answer in zip(names["advantages"], log_probs, target.tolist(), strict=True):
        length = answer.index(2) + 1 if 2 in answer else len(answer)
        total, tokens = total - advantage * row[:length].sum(), tokens + length
    assert names["advantages"].std() > 0.5 and tokens > 50
    (total / tokens).backward()
    pairs = [(gradient, p.grad) for p, (_, gradient) in zip(untiled.parameters(), seen[-1], strict=True)]
    assert all(relative_error(ours, theirs) <= 1e-3 for ours, theirs in pairs)
    whole = [torch.cat([gradient.flatten() for gradient in each]) for each in zip(*pairs, strict=True)]
    assert relative_error(*whole) <= 3e-5


@pytest.mark.parametrize("own", [False, True], ids=["known", "config"])
def test_plan(own: bool, directory: str) -> None:
    """The plan stops at the first sufficient number of GPUs."""
    names = run("plan", *([directory] if own else []))
    name, setup, length = names["name"], names["setup"], names["LENGTH"]
    assert memory.plan(name, seq_len=length, **setup).fits and "fits" in names["printed"]
    counts = [int(count) for count in re.findall(r"^ *(\d+) GPUs: [\d,]+ tokens, bound by", names["printed"], re.M)]
    assert counts == [2**i for i in range(len(counts))] and counts[-1] == setup["gpus"] and (len(counts) > 2) != own
    for count in counts[:-1]:
        assert not memory.plan(name, seq_len=length, **setup | {"gpus": count, "sequence_parallel": count}).fits
    for longer, fits in ((1, True), (2, False)):
        assert memory.plan(name, seq_len=longer * names["longest"].tokens, **setup).fits == fits


@pytest.mark.full("11 s of DeepSpeed, with which sp's cases train too", but=("fsdp2_sp",))
@pytest.mark.dist
@pytest.mark.parametrize("name", ["fsdp2_sp", "deepspeed_sp"])
def test_ranks_train_as_one_untiled_process_does(name: str, directory: str) -> None:
    pytest.importorskip("deepspeed" if "deepspeed" in name else "torch")
    found = []
    for count, how in ((1, "untiled"), (2, "tiled")):
        with Pool(count, "own") as pool:
            found.append(pool.run(on_rank, name, directory, how)[0])
    theirs, ours = found
    same_figures(ours["figures"], theirs["figures"])
    assert (theirs["mlps"], theirs["ranks"], ours["mlps"], ours["ranks"]) == (0, 1, 2, 2)
    assert_saved(f"runs/{name}", directory)


@pytest.mark.full("5 s; test/sp trains by GRPO over ranks too")
@pytest.mark.dist
def test_grpo_over_ranks(directory: str) -> None:
    """Completions of one prompt with different rewards; all ranks hold the same weights after the last step."""
    pytest.importorskip("trl")
    with Pool(2, "own") as pool:
        (mine, rewards), (others, _) = pool.run(trained_by_grpo, directory)
    assert mine == others and len(rewards) == 6 and max(rewards) > 0
    assert_saved("runs/grpo_sp/model", directory)

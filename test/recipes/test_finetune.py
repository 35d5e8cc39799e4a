import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import seqtile.rules
from recipes.cases import on_rank
from recipes.tiny_pretrained import save_tiny
from seqtile import __version__, memory
from seqtile.cli import app
from seqtile.recipes import Job
from seqtile.recipes.data import is_out_of_memory, load_config
from seqtile.recipes.finetune import fitted
from seqtile.recipes.output import picture, print_table, running_means
from seqtile.recipes.state import Run, loaded
from seqtile.recipes.train import has_square_mask, in_words, loss_of, sequence_group, train
from seqtile.sp import segments
from support.assertions import relative_error
from support.launch import interruptible
from support.measure import LiveBytes
from support.tiny import build, config_of

FITS = (("loss", "mlp"), memory.TILES)
TEXT = "a long document, of words and words and words; "


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pretrained")
    save_tiny(directory)
    return directory


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "document.txt"
    path.parent.mkdir()
    path.write_text(TEXT * 400)
    return path


def test_compare(
    pretrained: Path, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The whole job: sequences of more than a chunk, the untiled run in its own process, report, picture and model."""
    monkeypatch.setattr("seqtile.recipes.train.return_freed_memory", lambda: None)  # it permanently changes the process
    output = tmp_path / "new" / "run"
    job = ("--model", str(pretrained), "--data", str(document), "--seq-len", "2500", "--steps", "3", "--compare")
    code, ours = on_rank(*job, "--learning-rate", "1e-4", "--output", str(output))
    printed = capfd.readouterr().out + ours
    assert code == 0, printed
    report = json.loads((output / "report.json").read_text())
    for run in ("baseline", "seqtile"):
        assert len(report[run]["losses"]) == 3 and report[run]["peak_mib"] > 100
        assert report[run]["losses"][0] > report[run]["losses"][2], "it learns"
    assert "seqtile, 2048 tokens a chunk, 2 of 2 fused" in report["seqtile"]["status"]
    differences = [abs(a - b) for a, b in zip(report["baseline"]["losses"], report["seqtile"]["losses"], strict=True)]
    assert report["max_loss_difference"] == max(differences) <= 1e-4
    for name in ("untiled", "seqtile"):
        for step, end in ((1, r"  \d+ s left"), (2, r"  \d+ s left"), (3, "")):
            line = rf"{name}: step {step}/3  loss \d\.\d{{4}}  [\d,]+ tokens/s  peak [\d,]+ MiB{end}"
            assert re.search(f"^{line}$", printed, re.MULTILINE), "a line a step"
    assert ours.startswith("data: 1 file read, ") and "\033" not in printed
    assert not re.search("[\r\b]", printed), "no bars in a log"
    assert "peak memory, MiB" in ours and f"{report['seqtile']['losses'][2]:.6f}" in ours
    assert (output / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((output / "model").glob("*.safetensors"))
    assert (output / "model").stat().st_mode == output.stat().st_mode, "who may read the report may read the model"
    before = AutoModelForCausalLM.from_pretrained(pretrained)
    after = AutoModelForCausalLM.from_pretrained(output / "model")
    assert all(relative_error(b, a) > 0 for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(output / "model")("word")["input_ids"]


@pytest.mark.full("it has the layers of both others", but=("gemma3_text",))
@pytest.mark.parametrize("arch", ["mistral", "gemma2", "gemma3_text"])
def test_no_mask_of_length_x_length(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For models with sliding windows in one process: nothing grows with the square of the length, and loss and
    gradients are the model's."""
    save_tiny(tmp_path, arch)
    monkeypatch.setattr(segments, "MASK_ELEMENTS", 2**18)  # less than a mask of one of these lengths
    monkeypatch.setattr(seqtile.rules, "MIN_CHUNK_TOKENS", 256)
    largest = {}
    for length in (600, 900):  # more than a chunk
        job = Job(str(tmp_path), seq_len=length, steps=1, device="cpu", output=tmp_path)
        batch = torch.randint(3, 90, (1, length))
        run = Run(job, load_config(job.model), batch[None], tiled=True)
        assert has_square_mask(run.config, length)
        with sequence_group(job) as ctx:
            model = loaded(run, ctx).model
            with LiveBytes() as memory:
                loss = loss_of(model, batch, job, ctx)
                loss.backward()
        largest[length] = memory.largest
    assert not dist.is_initialized()
    assert largest[900] <= 1.6 * largest[600], "the square would be 2.25"
    expected = loaded(replace(run, tiled=False), None).model
    true = loss_of(expected, batch, job, None)
    true.backward()
    assert abs(loss.item() - true.item()) < 1e-5
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 1e-4


def test_a_group_of_one_only_where_masks_would_be_made() -> None:
    full = {"layer_types": ["full_attention"] * 2}
    for arch, changes in (("llama", {}), ("mistral", {"sliding_window": 9000}), ("gemma3_text", full)):
        assert not has_square_mask(config_of(arch, **changes), 9000), arch


def test_layers_tiled_as_a_whole(pretrained: Path, tmp_path: Path) -> None:
    job = Job(str(pretrained), seq_len=2500, steps=2, learning_rate=1e-4, device="cpu", layer=True, head_groups="auto")
    job = replace(job, output=tmp_path)
    rows = torch.randint(3, 90, (2, 1, 2500))
    run = Run(job, load_config(job.model), rows, tiled=True)
    tiled, untiled = train(run), train(replace(run, tiled=False))
    assert "layer seqtile, 2048 tokens a chunk, 2 of 2 fused, attention by 2 groups" in tiled.status
    assert tiled.losses == pytest.approx(untiled.losses, rel=1e-5)


@pytest.mark.full("what holds the weights is the same in both", but=("tiled",))
@pytest.mark.parametrize("tiled", [False, True], ids=["untiled", "tiled"])
def test_bfloat16_trains_float32_weights(
    pretrained: Path, tmp_path: Path, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning rate whose updates bfloat16 weights would round away, every parameter with a gradient changes."""
    monkeypatch.setattr("seqtile.recipes.train.return_freed_memory", lambda: None)  # it permanently changes the process
    job = Job(str(pretrained), seq_len=300, steps=3, dtype="bfloat16", device="cpu", output=tmp_path)
    rows = torch.randint(3, 90, (3, 1, 300))
    run = Run(job, load_config(job.model), rows, tiled, save_to=tmp_path)
    losses = train(run).losses
    in_float32 = train(replace(run, job=replace(job, dtype="float32"), save_to=None)).losses
    assert losses != in_float32 and losses == pytest.approx(in_float32, rel=0.02), "computed in bfloat16"
    before = AutoModelForCausalLM.from_pretrained(pretrained)
    after = AutoModelForCausalLM.from_pretrained(tmp_path)
    pairs = list(zip(before.parameters(), after.parameters(), strict=True))
    assert all(new.dtype == torch.float32 for _, new in pairs)
    moved = sum((old != new).sum().item() for old, new in pairs)
    assert moved > 0.7 * sum(old.numel() for old, _ in pairs)


def lines_until(beginning: str, process: subprocess.Popen) -> list[str]:
    """Returns the output of `process` up to the line with this start."""
    lines = [""]
    while not lines[-1].startswith(beginning):
        lines.append(process.stdout.readline())
        assert lines[-1], (lines, process.stderr.read())
    return lines[1:]


def test_fit(pretrained: Path, capsys: pytest.CaptureFixture) -> None:
    """The cheapest features with which a step fits; on a CPU in its own memory, without other memory to offload to."""
    job, size = Job(model=str(pretrained), seq_len=100_000, fit=True, device="cpu"), Console(soft_wrap=True)
    loose, tight = (memory.plan(config_of("llama"), seq_len=100_000, dtype="float32", tiles=tiles) for tiles in FITS)
    for plan, layer in ((loose, False), (tight, True)):
        with patch("seqtile.fitting.available", lambda size=plan.gpu_bytes: size):
            found = fitted(job, size)
        assert (found.fit, found.layer, found.head_groups, found.offload) == (False, layer, None, False)
    assert capsys.readouterr().out.count("GiB, fits") == 2
    autocast = memory.plan(config_of("llama"), seq_len=100_000, autocast=True)
    with patch("seqtile.fitting.available", lambda: autocast.gpu_bytes):
        assert not fitted(replace(job, dtype="bfloat16"), size).layer
    assert f"{autocast.gpu_bytes / 2**30:.1f} GiB, fits" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--fit chooses --layer, --head-groups and --offload"):
        replace(job, layer=True).check()


@pytest.mark.full("20 s each; test_on_ranks.py interrupts a rank")
@pytest.mark.parametrize(
    ("signum", "times", "code"),
    [(signal.SIGINT, 1, 130), (signal.SIGINT, 2, 130), (signal.SIGTERM, 1, -signal.SIGTERM)],
    ids=["interrupted", "interrupted twice", "killed"],
)
def test_ended_early(pretrained: Path, document: Path, tmp_path: Path, signum: int, times: int, code: int) -> None:
    """Ctrl-C, which a terminal sends to every process, saves the trained model. A second Ctrl-C ends the run at once.
    So does killing only the parent: its worker ends too, and nothing is written."""
    output = tmp_path / "run"
    command = [sys.executable, "-m", "seqtile.cli", "finetune", "--model", str(pretrained), "--data", str(document)]
    command += ["--seq-len", "15000" if times == 2 else "50", "--steps", "20000", "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = interruptible([*command, "--output", str(output)])
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            read = lines_until("seqtile: step 1/20000  loss ", process)
            (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
            if times == 2:
                lines_until("interrupted: after this step the model is saved; Ctrl-C again ends it at once", process)
                os.killpg(process.pid, signum)
            rest, errors = process.communicate(timeout=900)  # until the worker has closed its pipes too
        finally:
            with suppress(ProcessLookupError):  # as expected
                os.killpg(process.pid, signal.SIGKILL)
    assert read[0].startswith("data: 1 file read, ") and "step 20000/" not in rest
    assert process.returncode == code and "Traceback" not in errors, errors
    if signum == signal.SIGINT and times == 1:
        report = json.loads((output / "report.json").read_text())
        done = report["steps"]
        assert 1 <= done < 20_000 and len(report["seqtile"]["losses"]) == done
        assert f"model, report.json and report.png are in {output}\ninterrupted after step {done} of 20000; " in rest
        assert "note: no layer was tiled, since 50 tokens are no more than a chunk of 2,048;" in rest
        trained = AutoModelForCausalLM.from_pretrained(output / "model")
        before = AutoModelForCausalLM.from_pretrained(pretrained)
        assert all(relative_error(b, a) > 0 for a, b in zip(before.parameters(), trained.parameters(), strict=True))
        assert sorted(file.name for file in output.iterdir()) == ["checkpoint", "model", "report.json", "report.png"]
        assert f"checkpoint after step {done} of 20000 saved in {output / 'checkpoint'}\n" in rest
    else:
        assert rest.rstrip().endswith("interrupted") == (signum == signal.SIGINT)
        assert not list(output.iterdir())


def test_many_steps_stay_readable() -> None:
    run = {"losses": [10 - step / 200 for step in range(1000)], "peak_mib": 1.0, "step_seconds": [1.0] * 1000}
    run |= {"tokens_per_second": 1.0, "again": 9.0}
    report = {"model": "m", "seq_len": 8, "steps": 1000, "device": "cpu", "dtype": "float32"}
    report |= {"baseline": run, "seqtile": run, "max_loss_difference": 0.0}
    console = Console(record=True, width=120)
    print_table(report, console)
    text = console.export_text()
    assert text.count("loss, step") == 10 and "loss, step 1 " in text and "loss, step 1000 " in text
    for steps, marked in ((1000, False), (3, True), (1, True)):
        short = run | {"losses": run["losses"][:steps]}
        axes, memory = picture(report | {"steps": steps, "baseline": short, "seqtile": short}).axes
        ticks = axes.get_xticks()
        assert 1 <= len(ticks) <= 12 and all(tick == int(tick) for tick in ticks)
        assert all((line.get_marker() not in ("None", None)) == marked for line in axes.get_lines())
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == [f"{name}{', mean of 25 steps' * (steps == 1000)}" for name in ("untiled", "seqtile")]
        assert [bar.get_height() for bar in memory.patches] == [1.0, 1.0]
    assert running_means([1.0, 2.0, 6.0, 1.0], 2) == [1.0, 1.5, 4.0, 3.5] and running_means([3.0, 5.0], 1) == [3.0, 5.0]


def refused(*arguments: object) -> str:
    """Returns the one-line error of the command line for a job that it refuses."""
    result = CliRunner().invoke(app, ["finetune", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_bad_input(pretrained: Path, document: Path, tmp_path: Path) -> None:
    output, damaged, small, binary = (tmp_path / name for name in ("run", "damaged", "small", "binary.dat"))
    common = ("--model", pretrained, "--output", output, "--seq-len", 50, "--steps", 1)
    binary.write_bytes(b"\xff\xfe")
    for directory in (damaged, small):
        shutil.copytree(pretrained, directory)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    build("llama", vocab_size=60).save_pretrained(small)
    alone = "--sequence-parallel is 4, but this is one process; start one on each GPU: torchrun --nproc-per-node 4"
    short = "tokens, expected at least 1000000, one sequence; pass more text, or a shorter --seq-len"
    no_text = f"--data holds no UTF-8 text: 1 file skipped, {binary} (not UTF-8 text) first; pass text"
    elsewhere = "cannot be written to"
    for arguments, message in (
        (("--data", tmp_path / "nowhere"), "does not exist"),
        (("--seq-len", 1), "--seq-len: expected at least 2, a token and the one that follows it, got 1"),
        (("--sequence-parallel", 4), alone),
        (("--offload", "--device", "cpu"), "--offload moves what checkpointing keeps off a GPU"),
        (("--head-groups", "auto"), "--head-groups is for layers tiled as a whole"),
        (("--layer", "--head-groups", "many"), "--head-groups: expected a number or auto, got 'many'"),
        (("--steps", 0), "--steps: expected at least 1, got 0"),
        (("--dtype", "int4"), "--dtype: expected one of float32, bfloat16, got 'int4'"),
        (("--device", "tpu"), "--device: expected cpu or cuda, got 'tpu'"),
        (
            ("--learning-rate", 1e4),
            "--learning-rate: expected more than 0 and at most 1, AdamW's step of a weight, got 10000.0",
        ),
        (("--model", "/nowhere"), "--model: /nowhere does not exist"),
        (("--model", tmp_path), "holds no config.json"),
        (("--data", document, "--seq-len", 1_000_000), short),
        (("--data", binary), no_text),
        (("--model", small, "--data", document, "--compare"), "the tokenizer gave token"),
        (("--data", document, "--output", document / "run"), elsewhere),
    ):
        said = refused(*common, *arguments)
        assert message in said and (message != elsewhere or "choose another directory" in said), said
    assert not output.exists(), "a refused job leaves nothing behind"
    said = refused(*common, "--data", document, "--model", damaged, "--output", tmp_path / "other")
    assert "the weights of" in said and "cannot be loaded" in said and not list((tmp_path / "other").iterdir())


def test_bad_options_are_told_before_anything_slow_is_imported() -> None:
    said = {
        ("--seq-len", "1"): "--seq-len: expected at least 2, a token and the one that follows it, got 1",
        ("--dtype", "int4"): "--dtype: expected one of float32, bfloat16, got 'int4'",
        ("--model", "./nowhere"): "--model: nowhere does not exist",
        ("--data", "nowhere"): "--data: nowhere does not exist",
        ("--resume", "--output", "nowhere"): "--resume: expected a checkpoint in nowhere, got none",
    }
    code = f"""
import sys
from seqtile.cli import main
for arguments in {list(said)}:
    sys.argv = ["seqtile", "finetune", *arguments]
    try: main()
    except SystemExit as ended: assert ended.code == 1, arguments
    assert not {{"torch", "transformers", "matplotlib"}} & sys.modules.keys(), arguments
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr, result.stdout + result.stderr
    assert all(message in result.stdout for message in said.values()), result.stdout


def test_running_out_of_memory_is_told_from_a_mistake() -> None:
    with pytest.raises(RuntimeError) as allocation:
        torch.empty(2**56)
    with pytest.raises(RuntimeError) as mistake:
        torch.zeros(2) @ torch.zeros(3)
    assert is_out_of_memory(allocation.value) and not is_out_of_memory(mistake.value)
    assert is_out_of_memory(EOFError())


def test_env_fits_into_a_bug_report() -> None:
    result = CliRunner().invoke(app, ["env"])
    lines = result.output.splitlines()
    assert result.exit_code == 0 and all(re.match(r"- [\w ]+: \S", line) for line in lines) and 13 <= len(lines) <= 15
    assert f"- torch: {torch.__version__}" in lines and f"- Python: {sys.version.split()[0]}" in lines
    assert ("- GPU: none" in lines) != torch.cuda.is_available()
    assert sum(f"{package}" in result.output for package in ("flash-attn", "accelerate", "deepspeed")) == 3


def test_env_says_what_chooses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches of torch's attention, cuDNN, and the compiler that Triton needs."""
    monkeypatch.setenv("CC", "/usr/bin/my-cc")
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    lines = CliRunner().invoke(app, ["env"]).output.splitlines()
    assert {"- sdpa: flash on, mem_efficient on, math on, cudnn off", "- cuDNN: 91900"} < set(lines)
    assert any(re.fullmatch("- C compiler: /usr/bin/my-cc, with(out)? Python.h", line) for line in lines)
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    output = CliRunner().invoke(app, ["env"]).output
    assert "- cuDNN: none" in output and "- C compiler: none, with" in output


def test_env_where_torch_cannot_be_imported() -> None:
    with patch.dict(sys.modules, {"torch": None}):
        result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0 and "- GPU: unknown: torch cannot be imported (" in result.output


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output, version("seqtile")) == (0, f"seqtile {__version__}\n", __version__)


def test_help_is_grouped() -> None:
    """Every option of the job is in a group."""
    result = CliRunner().invoke(app, ["finetune", "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    panels = re.split(r"╭─ ([\w ]+) ─+╮", result.output)[1:]
    options = [re.findall(r"^│ (--[\w-]+)", text, re.MULTILINE) for text in panels[1::2]]
    assert len(options) == 6 and options[panels[::2].index("Options")] == ["--help"]
    assert sum(len(set(each)) for each in options) == len(fields(Job))  # one is hidden, --help is extra


def test_lengths_of_time() -> None:
    said = {0.4: "0 s", 89: "89 s", 90: "2 min", 7000: "117 min", 7300: "2 h 2 min"}
    assert {seconds: in_words(seconds) for seconds in said} == said

"""`seqtile plan` for a model type without a formula runs the model's own code without data."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from seqtile import memory
from seqtile.cli import app
from seqtile.memory import FEATURES, Setup, simulate
from seqtile.memory.setup import GIB
from seqtile.memory.simulate import Simulation
from seqtile.models.model_types import model_classes
from seqtile.recipes.plan import PlanResult
from seqtile.recipes.plan_output import print_forecast


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "CHUNKS", 3)


SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
}
TILES = {name: FEATURES[name].changes["tiles"] for name in ("nothing", "loss", "loss, MLP", "loss, MLP, layer")}


@pytest.mark.full("4 s each; the others go through the same lines")
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_where_there_is_a_formula_too(model_type: str) -> None:
    """Most layers do not run, and 300,000 tokens are more than the simulation uses."""
    config = CONFIG_MAPPING[model_type](**SIZES)
    steps: list[str] = []
    simulation = Simulation(model_classes(model_type)[0], config, Setup(), steps.append)
    assert simulation.others == 6
    turned_on = {name: setup.tiles for name, setup, refusal in simulation.turned_on(Setup()) if refusal is None}
    assert turned_on == TILES
    for name, tiles in TILES.items():
        setup = Setup(tiles=tiles, gpu_memory_gib=4 + simulation.held / GIB)

        def bytes_of(tokens: int, setup: Setup = setup) -> float:
            return simulation.predict(setup, tokens, 1).gpu_bytes - simulation.held

        longest = simulation.longest(setup, batch_size=2).tokens
        assert bytes_of(2 * longest) <= 2**32 < bytes_of(2 * longest + 2)
        if name == "loss, MLP, layer" and model_type == "gemma2":
            continue  # the formulas do not have them
        parts = memory.plan(config.to_dict(), seq_len=300_000, tiles=tiles).peak.parts
        planned = sum(size for part, size in parts.items() if part not in ("weights", "optimizer", "reserved"))
        assert bytes_of(300_000) == pytest.approx(planned, rel=0.05), name
    assert len(steps) == 2 * len(TILES) and len(set(steps)) == len(steps)


def said(config: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["plan", str(config), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.full("12 s; test_fitting simulates types, too")
def test_the_command(tmp_path: Path) -> None:
    CONFIG_MAPPING["olmo3"](**SIZES | {"layer_types": None}).save_pretrained(tmp_path)
    found = json.loads(said(tmp_path, "--json"))
    lengths = list(found["simulated"].values())
    assert list(found["simulated"]) == list(TILES) and lengths == sorted(lengths) and lengths[0] > 0
    assert "simulated with its own code" in found["notes"][-1]
    assert "it is simulated only for one GPU" in said(tmp_path, "--gpus", "2")


@pytest.mark.full("4 s; other models go through the same lines")
def test_experts_without_a_formula(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": None}
    CONFIG_MAPPING["gpt_oss"](**sizes).save_pretrained(tmp_path)
    found = json.loads(said(tmp_path, "--json"))
    lengths = list(found["simulated"].values())
    assert list(found["simulated"]) == list(TILES) and 0 < lengths[0] < lengths[2] < lengths[3]
    assert "so it is only simulated" in found["notes"][0]
    forecast = PlanResult("it", 80, [], found["simulated"])
    assert forecast.fits(lengths[3]) and not forecast.fits(lengths[3] + 1)
    print_forecast(forecast, Console())
    assert "Longest sequence, predicted by a simulation" in " ".join(capsys.readouterr().out.split())


def test_a_length_beside_simulated_ones(capsys: pytest.CaptureFixture) -> None:
    """The row that it needs is marked; whether it fits, and whether that takes seqtile, is said."""
    lengths = {"nothing": 5000, "loss": 5000, "loss, MLP": 7000}
    not_needed, no_room = "seqtile is not needed: 4,000 tokens are predicted", "This is predicted not to fit"
    for seq_len, marked in ((None, None), (4000, "nothing"), (6000, "loss, MLP"), (8000, None)):
        print_forecast(PlanResult("it", 80, [], lengths, seq_len=seq_len), Console())
        text = capsys.readouterr().out
        assert [tiled for tiled in lengths if f"│ {tiled:9} │ * " in text] == [marked] * (marked is not None)
        assert (not_needed in text) == (seq_len == 4000) and (no_room in text) == (seq_len == 8000)


def test_states_along_the_sequence(tmp_path: Path) -> None:
    CONFIG_MAPPING["jamba"]().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert result.exit_code == 1 and "it cannot be simulated: some of its layers have no" in result.stdout

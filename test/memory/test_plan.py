"""Plans: they accept any configuration, are consistent, and refuse impossible setups."""

import random
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from seqtile import memory
from seqtile.arch import ARCHS
from seqtile.memory import Formula
from seqtile.memory.batch import Batch
from seqtile.memory.layer import chunk_tokens, head_shares
from seqtile.ops.chunks import resolve_chunk_tokens
from support.choice import every_value
from support.tiny import config_of

LLAMA = "meta-llama/Llama-3.1-8B"
GIB = 2**30
PARAMETERS = {  # in millions, from the model cards
    "meta-llama/Llama-3.1-8B": 8030,
    "meta-llama/Llama-3.1-70B": 70554,
    "Qwen/Qwen3-0.6B": 596,
    "Qwen/Qwen3-4B": 4022,
    "Qwen/Qwen3-8B": 8191,
    "Qwen/Qwen3-32B": 32762,
    "mistralai/Mistral-7B-v0.3": 7248,
    "google/gemma-2-9b": 9242,
    "HuggingFaceTB/SmolLM2-135M": 135,
}


def tiny_config(arch: str, **changes: object) -> PreTrainedConfig:
    return config_of(arch, **({"mlp_only_layers": []} if ARCHS[arch].routed else {}) | changes)


@pytest.mark.parametrize("name", memory.KNOWN)
def test_known_by_name(name: str) -> None:
    assert round(memory.shape_of(name).parameters / 1e6) == PARAMETERS[name]
    assert memory.shape_of(name.lower()) == memory.shape_of(f"{name}-Instruct") == memory.KNOWN[name]


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_parameters(arch: str, changes: dict) -> None:
    """For every architecture, the config alone gives the model's number of parameters."""
    config = tiny_config(arch, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert memory.shape_of(config).parameters == model.num_parameters()


@pytest.mark.parametrize("arch", ARCHS)
def test_config_json(arch: str, tmp_path: Path) -> None:
    """A config's file, its directory, its fields and the object mean the same."""
    config = tiny_config(arch)
    config.save_pretrained(tmp_path)
    for given in (tmp_path, str(tmp_path), tmp_path / "config.json", config.to_dict()):
        assert memory.shape_of(given) == memory.shape_of(config)


@pytest.mark.parametrize("arch", ARCHS)
def test_fields_that_a_config_json_leaves_out(arch: str) -> None:
    """Missing fields mean the same as in Hugging Face."""
    fields = tiny_config(arch, hidden_size=384, num_attention_heads=32).to_dict()
    required = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    experts = {"num_experts", "num_local_experts"}
    for name in {name for other in ARCHS.values() for name in other.defaults} - required:
        without = experts if name in experts else {name}
        rest = {key: value for key, value in fields.items() if key not in without}
        assert memory.shape_of(rest) == memory.shape_of(AutoConfig.for_model(**rest)), name


def test_a_text_model_in_another() -> None:
    """Its config.json omits the defaults of its class, as Gemma-3-4B's does."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = memory.shape_of({"model_type": "gemma3", "text_config": text})
    assert replace(shape, inside=None) == replace(memory.shape_of(AutoConfig.for_model(**text)), positions=None)
    assert shape.tied and shape.notes == ["only the text model of gemma3 is planned"]


def test_another_type_is_taken_for_a_llama() -> None:
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = memory.shape_of(fields | {"model_type": "new", "vocab_size": 100})
    assert shape.assumed and shape.arch == replace(ARCHS["llama"], layer=False, liger=False)
    assert shape.notes == ["model type new is not known; planned as a Llama, which may be far off"]
    assert memory.shape_of(fields | {"vocab_size": 100}).assumed, "no type at all"
    quantised = memory.shape_of(fields | {"vocab_size": 100, "model_type": "llama", "quantization_config": {"bits": 4}})
    assert quantised.notes == ["its quantization_config is not read: weights are counted in full without load_in_4bit"]
    assert not any(known.assumed for known in memory.KNOWN.values())
    assert not any(memory.shape_of(tiny_config(arch)).assumed for arch in ARCHS)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_rule_of_tiles_is_that_of_ops(arch: str) -> None:
    shape = memory.shape_of(tiny_config(arch))
    spread = shape.experts / shape.experts_per_token if shape.experts else 1
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        ours = resolve_chunk_tokens(None, shape.hidden, spread, shape.mlp, size)
        assert chunk_tokens(shape, memory.Setup(dtype=dtype), mlp=True) == ours
    assert chunk_tokens(shape, memory.Setup()) == resolve_chunk_tokens(None, shape.hidden), "of the loss"


@pytest.mark.full("of 36 ladders", but=every_value)
@pytest.mark.parametrize(
    ("gpus", "sequence_parallel", "offload"),
    [(1, 1, ("optimizer", "weights")), (8, 8, ()), (16, 4, ("optimizer",)), (64, 64, ("optimizer",))],
)
@pytest.mark.parametrize("name", memory.KNOWN)
def test_longest_is_the_longest(name: str, gpus: int, sequence_parallel: int, offload: tuple[str, ...]) -> None:
    """On every rung of the ladder it fits, one more token per GPU does not, and no feature makes it shorter."""
    setup = {"gpus": gpus, "sequence_parallel": sequence_parallel, "offload": offload}
    shape = memory.KNOWN[name]
    lengths = []
    for rung, longest in memory.ladder(name, **setup):
        size = rung.sequence_parallel
        fields = {field: getattr(rung, field) for field in rung.__dataclass_fields__}
        if longest.tokens:
            assert longest.tokens % size == 0 and memory.plan(shape, seq_len=longest.tokens, **fields).fits
        more = memory.plan(shape, seq_len=longest.tokens + size, **fields)
        assert not more.fits and longest.bound == more.bound and longest.bound in str(longest)
        assert longest == memory.longest(shape, **fields)
        lengths.append(longest.tokens)
    assert lengths == sorted(lengths)
    ends = (sequence_parallel < shape.kv_heads) if shape.tiles_whole else 1  # in head chunks, or with Liger's norms
    assert len(lengths) == 4 + shape.tiles_whole + (sequence_parallel > 1) + ends
    assert lengths[-1] >= memory.longest(name, **setup | {"offload": ("activations", *offload)}, liger=True).tokens


def test_what_a_plan_says() -> None:
    plan = memory.plan(LLAMA, seq_len=100_000, gpus=8, sequence_parallel=8, offload=("activations", "optimizer"))
    assert set(plan.host) == {"inputs", "optimizer"}
    assert plan.host["inputs"] == 8 * 31 * 12_500 * 4096 * 2
    text = str(plan)
    assert "of 80 GiB: fits\n" in text
    assert "of 1 GiB: does not fit in GPU memory: weights and optimizer" in str(
        memory.plan(LLAMA, seq_len=8, gpu_memory_gib=1)
    )
    assert all(f"{size / GIB:.2f} GiB" in text for size in (*plan.peak.parts.values(), *plan.host.values()) if size)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2, 2, 12), (1, 2, 2, 1.5), (2, 2, 0.25, 1.5), (3, 0.25, 0.25, 1.5)],
)
def test_zero(stage: int, weights: float, gradients: float, optimizer: float) -> None:
    """Bytes per parameter over 8 GPUs; 16 in all over one (ZeRO, 3.1)."""
    plan = memory.plan(LLAMA, seq_len=8, gpus=8, zero_stage=stage)
    embedding, shape = plan.moments[-1].parts, plan.shape
    assert embedding["weights"] == shape.parameters * weights
    assert embedding["optimizer"] == shape.parameters * optimizer
    done = shape.parameters - shape.head_parameters  # the embedding's own gradient is still whole
    assert embedding["gradients"] == done * gradients + shape.head_parameters * 2


@pytest.mark.parametrize(("gpus", "on_a_node"), [(1, 1), (4, 4), (8, 8), (12, 8), (16, 8)])
def test_host_memory_of_a_node(gpus: int, on_a_node: int) -> None:
    plan = memory.plan(LLAMA, seq_len=8192 * gpus, gpus=gpus, sequence_parallel=gpus, offload=memory.OFFLOAD)
    parameters = plan.shape.parameters
    assert plan.host["inputs"] == on_a_node * 31 * 8192 * 4096 * 2
    assert plan.host["optimizer"] == on_a_node * (parameters * 12 // gpus + parameters * 4 // gpus)
    assert plan.host["weights"] == on_a_node * (parameters * 2 // gpus)
    assert plan.peak.parts["weights"] == plan.peak.parts["optimizer"] == plan.peak.parts["gradients"] == 0


@pytest.mark.parametrize(
    ("setup", "weights", "optimizer"),
    [
        ({}, 2, 12),
        ({"dtype": "float32"}, 4, 8),
        ({"autocast": True}, 4, 8),
        ({"optimizer": "sgd", "dtype": "float16"}, 2, 0),
    ],
    ids=str,
)
def test_bytes_a_parameter(setup: dict, weights: int, optimizer: int) -> None:
    """With AdamW 16, of which gradients take 2 or 4; offloaded layer inputs have 4 bytes per element under autocast."""
    plan = memory.plan(LLAMA, seq_len=8192, offload=("activations",), **setup)
    assert plan.peak.parts["weights"] == plan.shape.parameters * weights
    assert plan.peak.parts["optimizer"] == plan.shape.parameters * optimizer
    assert plan.host["inputs"] == 31 * 8192 * 4096 * weights


def test_8_bit_adamw() -> None:
    """Two bytes per parameter, and eight per embedding parameter: Trainer configures bitsandbytes to use float32
    there."""
    tied, untied = "Qwen/Qwen3-4B", LLAMA
    for name, embedding in ((tied, 151_936 * 2560), (untied, 128_256 * 4096)):
        for gpus in (1, 8):
            plan = memory.plan(name, seq_len=8192 * gpus, gpus=gpus, optimizer="adamw_8bit")
            assert plan.peak.parts["optimizer"] == (plan.shape.parameters * 2 + embedding * 6) // gpus
    plan = memory.plan(LLAMA, seq_len=8192, optimizer="adamw_8bit", lora_rank=16)
    assert plan.peak.parts["optimizer"] == 41_943_040 * 2, "no embedding is trained"


def test_adapters() -> None:
    """Rank 16 on every projection of Llama-3.1-8B has 41.9 million parameters."""
    plan = memory.plan(LLAMA, seq_len=8, lora_rank=16)
    assert plan.peak.parts["optimizer"] == 41_943_040 * 8, "PEFT's are in float32 and need no other weights"
    assert plan.peak.parts["weights"] == plan.shape.parameters * 2 + 41_943_040 * 4
    with pytest.raises(ValueError, match="lora_rank: adapters of a mixture of experts are not planned"):
        memory.plan(config_of("mixtral"), seq_len=8, lora_rank=16)
    with pytest.raises(ValueError, match="autocast: expected False for a mixture of experts, got True"):
        memory.plan(config_of("mixtral"), seq_len=8, autocast=True)


def test_the_published_ladder() -> None:
    """ALST's ablation (table 1: Llama-8B, 8 H100 of 80 GB): the same order, each within 40 % of the measured value."""
    planned = []
    for published, shared_by, *names in (
        (32_000, 1, "nothing"),
        (160_000, 1, "loss"),
        (1_100_000, 8, "loss"),
        (1_200_000, 8, "loss, MLP"),
        (2_400_000, 8, "loss", "host"),
        (3_700_000, 8, "loss, MLP", "host"),
    ):
        setup = memory.Setup(gpus=8, sequence_parallel=shared_by, offload=("optimizer",))
        planned.append(memory.longest(LLAMA, **asdict(memory.with_features(setup, *names))).tokens)
        assert 1 / 1.4 < planned[-1] / published < 1.4, (planned, published)
    assert sorted(planned) == planned


def test_features_are_turned_on_in_the_order_of_fit() -> None:
    """Each beside those before it; what a model or a setup cannot have is left out, with the reason."""
    llama, gemma = (Formula(memory.shape_of(name)) for name in (LLAMA, "google/gemma-2-9b"))
    given = memory.Setup(gpus=8, sequence_parallel=8, offload=("optimizer",), attention="sdpa", rows="packed")
    steps = {name: (setup, refusal) for name, setup, refusal in llama.turned_on(given)}
    assert list(steps) == list(memory.FEATURES)
    assert [name for name, (_, refusal) in steps.items() if refusal] == ["attention", "groups", "Liger"]
    assert steps["attention"][1] == "sdpa makes none here", "over GPUs seqtile.sp attends in blocks"
    assert steps["groups"][1] == "8 kv heads over 8 GPUs make no groups"
    assert (
        steps["host"][0]
        == steps["groups"][0]
        == replace(given, tiles=memory.TILES, offload=("activations", "optimizer"))
    )
    assert steps["loss, MLP, layer"][0] == replace(given, tiles=memory.TILES)
    refused = {name: refusal for name, _, refusal in gemma.turned_on(given, host=False) if refusal}
    assert refused == {
        "attention": "sdpa makes none here",
        "loss, MLP, layer": "not planned for gemma2",
        "host": "what is trained is in host memory",
        "groups": "not planned for gemma2",
    }
    *_, (_, last, _) = gemma.turned_on(replace(given, tiles=memory.TILES, head_groups=2))
    assert last.liger and last.tiles == ("loss", "mlp") and last.head_groups is None


def test_a_sequence_is_shared_where_tiles_are_not_enough() -> None:
    rungs = [rung for rung, _ in memory.ladder(LLAMA, gpus=8, sequence_parallel=4, head_groups=2)]
    tiles = ((), ("loss",), ("loss", "mlp"), memory.TILES)
    assert [(rung.sequence_parallel, rung.tiles) for rung in rungs] == [
        *((1, tiled) for tiled in tiles),
        *[(4, memory.TILES)] * 3,
    ]
    assert [rung.head_groups for rung in rungs] == [None] * 6 + [2]
    assert [rung.offload for rung in rungs] == [()] * 5 + [("activations",)] * 2


def test_masks_are_those_of_the_batch() -> None:
    """One byte a pair of tokens and kind of layer, also beside the loss; for each row, unless a window masks all alike.
    None for other attentions, nor over GPUs, nor for a window that no sequence reaches."""
    length, rows = random.randint(5000, 9000), random.randint(2, 4)
    given = {"seq_len": length, "batch_size": rows, "tiles": ()}

    def loss(name: str, **setup: object) -> int:
        plan = memory.plan(name, **given, **setup)
        return next(moment.bytes for moment in plan.moments if moment.name == "loss")

    gemma, mistral = "google/gemma-2-9b", memory.shape_of(AutoConfig.for_model("mistral", sliding_window=4096))
    for name, row_count, kinds, setup in (
        (LLAMA, rows, 0, {"attention": "sdpa"}),
        (LLAMA, rows, 1, {"attention": "sdpa", "rows": "packed"}),
        (LLAMA, rows, 1, {"attention": "sdpa", "rows": "padded"}),
        (LLAMA, rows, 0, {"attention": "varlen", "rows": "packed"}),
        (LLAMA, rows, 0, {"attention": "sdpa", "rows": "packed", "gpus": 2, "sequence_parallel": 2}),
        (LLAMA, rows, 2, {"attention": "eager"}),  # of two bytes
        (gemma, 1, 1, {"attention": "sdpa"}),
        (gemma, rows, 2, {"attention": "sdpa", "rows": "packed"}),
        (mistral, 1, 1, {"attention": "sdpa"}),
        (replace(mistral, windows=(length + 1,)), 1, 0, {"attention": "sdpa"}),
    ):
        more = loss(name, **setup) - loss(name, **setup | {"attention": "flash"})
        assert more == kinds * row_count * length**2, (name, setup)


def test_windows() -> None:
    """Of each kind of layer that has a mask of its own."""
    sliding = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    for arch, changes, windows in (
        ("llama", {}, (None,)),
        ("mistral", {"sliding_window": 64}, (64,)),
        ("mistral", {"sliding_window": None}, (None,)),
        ("gemma2", {"sliding_window": 64}, (64, None)),
        ("qwen2", sliding, (64, None)),
        ("qwen2", sliding | {"use_sliding_window": False}, (None,)),
    ):
        assert memory.shape_of(tiny_config(arch, **changes)).windows == windows
    raw = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    assert memory.shape_of(raw | {"vocab_size": 9, "model_type": "mistral", "sliding_window": None}).windows == (None,)
    with pytest.raises(ValueError, match="sliding_window: expected a positive int or null, got 'wide'"):
        memory.shape_of(raw | {"vocab_size": 9, "sliding_window": "wide"})


def test_attention_without_masks_is_the_first_feature() -> None:
    """Where the model's makes masks or scores; the rows that follow have it."""
    given = {"offload": ("optimizer", "weights"), "gpu_memory_gib": 64}
    for setup in ({}, {"attention": "sdpa"}, {"attention": "varlen", "rows": "packed"}):
        assert len({rung.attention for rung, _ in memory.ladder(LLAMA, **given, **setup)}) == 1
    for setup in ({"attention": "sdpa", "rows": "packed"}, {"attention": "eager"}):
        first, second, *others = memory.ladder(LLAMA, **given, **setup)
        assert (first[0].attention, second[0].attention) == (setup["attention"], "varlen")
        assert first[0].tiles == second[0].tiles == () and first[1].tokens < second[1].tokens
        assert {rung.attention for rung, _ in others} == {"varlen"} and others[-1][0].head_groups == "auto"
        flash = [longest.tokens for _, longest in memory.ladder(LLAMA, **given)]
        assert flash == [longest.tokens for _, longest in (second, *others)]


LAYER, TWO = {"tiles": memory.TILES}, {"gpus": 2, "sequence_parallel": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0}, "seq_len: expected a positive int, got 0"),
        ({"seq_len": 1.5}, "seq_len: expected a positive int, got 1.5"),
        ({"batch_size": 0}, "batch_size: expected a positive int"),
        ({"shared_tokens": -1}, "shared_tokens: expected 0 or more tokens, got -1"),
        ({"shared_tokens": True}, "shared_tokens: expected 0 or more tokens, got True"),
        ({"shared_tokens": 8, "batch_size": 2}, "shared_tokens: expected fewer than the 8 tokens of a sequence, got 8"),
        ({"shared_tokens": 4}, "batch_size: expected 2 or more sequences, which begin with shared_tokens, got 1"),
        (
            TWO | {"shared_tokens": 4, "batch_size": 2},
            "batches: expected whole, since a part of a batch tells no GPU what it shares, got 'cut'",
        ),
        (
            LAYER | {"shared_tokens": 4, "batch_size": 2, "head_groups": "auto"},
            "head_groups: expected a number, since attention of shared tokens by groups",
        ),
        ({"rows": "short"}, "rows: expected one of plain, packed, padded, got 'short'"),
        ({"attention": "ring"}, "attention: expected one of varlen, flash, sdpa, eager, got 'ring'"),
        (
            LAYER | {"head_groups": "auto", "attention": "sdpa", "rows": "packed"},
            "head_groups: expected a number, or attention other than sdpa for packed rows in bfloat16, got 'auto'",
        ),
        ({"gpus": 0}, "gpus: expected a positive int"),
        ({"gpus": 6, "sequence_parallel": 4}, "sequence_parallel: expected a divisor of the 6 GPUs, got 4"),
        ({"zero_stage": 4}, "zero_stage: expected 0, 1, 2 or 3, got 4"),
        ({"optimizer": "lion"}, "optimizer: expected one of adamw, adamw_8bit, sgd, got 'lion'"),
        ({"dtype": torch.bfloat16}, "dtype: expected one of bfloat16, float16, float32"),
        ({"tiles": "norm"}, "tiles: expected some of loss, mlp, layer, got 'norm'"),
        ({"offload": "optimiser"}, "offload: expected some of activations, optimizer, weights, got 'optimiser'"),
        ({"offload": [["optimizer"]]}, "offload: expected some of activations, optimizer, weights, got "),
        ({"keep_last": -1}, "keep_last: expected 0 or more layers"),
        ({"lora_rank": 0}, "lora_rank: expected a positive int"),
        ({"load_in_4bit": True}, "load_in_4bit: expected False, or lora_rank too"),
        ({"load_in_4bit": 4, "lora_rank": 8}, "load_in_4bit: expected True or False, got 4"),
        ({"load_in_4bit": True, "lora_rank": 8, "offload": "weights"}, "offload of weights: expected none"),
        ({"gpu_memory_gib": 0}, "gpu_memory_gib: expected more than 0 GiB"),
        ({"host_memory_gib": float("nan")}, "host_memory_gib: expected more than 0 GiB"),
        ({"gpu_memory_gib": float("inf")}, "gpu_memory_gib: expected more than 0 GiB, got inf"),
        ({"gpu_memory_gib": "80"}, "gpu_memory_gib: expected more than 0 GiB, got '80'"),
        ({"tiles": 5}, "tiles: expected some of"),
        ({"tiles": ("loss", "layer")}, "tiles: expected mlp too, since it is tiled with the layer"),
        ({"head_groups": 2}, "head_groups: expected None, since tiles has no layer, got 2"),
        (LAYER | {"head_groups": 0}, 'head_groups: expected a positive int, "auto" or None, got 0'),
        (LAYER | {"head_groups": True}, 'expected a positive int, "auto" or None, got True'),
        (LAYER | {"head_groups": 3}, "head_groups: expected a divisor of the 8 kv heads, got 3"),
        (
            LAYER | {"head_groups": 4, "gpus": 4, "sequence_parallel": 4},
            "expected at most 2 groups, so that each of the 4 GPUs",
        ),
        ({"dtype": ["bfloat16"]}, "dtype: expected one of"),
        ({"liger": "no"}, "liger: expected True or False, got 'no'"),
        ({"autocast": 1}, "autocast: expected True or False, got 1"),
        ({"autocast": True, "dtype": "float32"}, "dtype: expected bfloat16 or float16 under autocast"),
        ({"autocast": True, "load_in_4bit": True, "lora_rank": 8}, "autocast: expected False with load_in_4bit"),
        ({"optimizer": "adamw_8bit", "offload": ("optimizer",)}, "expected adamw or sgd, got adamw_8bit"),
        ({"gpus": 8, "zero_stage": 2, "offload": ("weights",)}, "offload of weights needs zero_stage 3 on 8 GPUs"),
    ],
    ids=str,
)
def test_wrong_setups(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory.plan(LLAMA, **{"seq_len": 8} | arguments)


def test_layers_that_are_tiled_as_a_whole() -> None:
    """For exactly the model types that seqtile tiles so, with the number of head groups that it uses."""
    assert all(memory.shape_of(tiny_config(name)).tiles_whole == arch.layer for name, arch in ARCHS.items())
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 4, "vocab_size": 100}
    others = [tiny_config("gemma2"), fields | {"model_type": "new"}]
    others.append({"model_type": "mistral3", "text_config": fields | {"model_type": "mistral"}})
    for config in others:
        with pytest.raises(ValueError, match="whole layers are not planned; expected one of granite, llama, "):
            memory.plan(config, seq_len=8, tiles=memory.TILES)
        assert not any("layer" in rung.tiles for rung, _ in memory.ladder(config))
    config = fields | {"model_type": "llama", "num_attention_heads": 36, "num_key_value_heads": 12, "head_dim": 8}
    auto, six, four = (
        memory.plan(config, seq_len=9000, tiles=memory.TILES, head_groups=groups) for groups in ("auto", 6, 4)
    )
    assert auto.moments == six.moments != four.moments
    *_, (rung, longest) = memory.ladder(LLAMA, offload=("optimizer", "weights"), head_groups=2)
    assert rung.head_groups == 2 and longest.tokens < memory.longest(LLAMA, **asdict(rung) | {"head_groups": 4}).tokens


@pytest.mark.parametrize(("option", "name"), [("offload", "optimizer"), ("tiles", "loss")])
def test_one_name_is_taken_as_one(option: str, name: str) -> None:
    longest, found = (memory.longest(LLAMA, gpus=8, **{option: value}) for value in (name, (name,)))
    assert longest == found != memory.longest(LLAMA, gpus=8)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpu", "did you mean gpus?"),
        ("offlod", "did you mean offload?"),
        ("batchsize", "did you mean batch_size?"),
        ("headgroups", "did you mean head_groups?"),
        ("colour", "expected some of batch_size, gpus, "),
    ],
)
def test_wrong_names(name: str, hint: str) -> None:
    for function in (memory.longest, partial(memory.plan, seq_len=8), lambda *a, **b: list(memory.ladder(*a, **b))):
        with pytest.raises(TypeError, match=re.escape(f"{name} is no option of a plan; {hint}")):
            function(LLAMA, **{name: 8})


def test_wrong_models() -> None:
    known = r"a name known offline: meta-llama/Llama-3\.1-8B, .*; for any other model, download its config\.json"
    for name in ("Qwen/Qwen3-14B", "x" * 5000):
        with pytest.raises(ValueError, match=rf"model '.*': expected .* {known}"):
            memory.longest(name)
    for config in (None, 5, [LLAMA]):
        with pytest.raises(ValueError, match="expected a model's config, a dict of one, a path or a name, got"):
            memory.longest(config)
    for varied in ({"liger": True}, {"tiles": ("loss",)}, {"offload": ("activations",)}):
        with pytest.raises(ValueError, match="expected none, since all are tried"):
            list(memory.ladder(LLAMA, **varied))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "expected a model's config, a dict of one"),
        ('{"text_config": [1]}', "expected a model's config, a dict of one"),
        ('{"model_type": ["llama"]}', "config's model_type: expected a str"),
        ('{"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 8}', "a divisor of the 4 heads, got 8"),
        (
            '{"model_type": "deepseek_v3", "n_routed_experts": 256}',
            "has experts or latent attention; of such, mixtral and qwen3_moe are planned",
        ),
        ('{"model_type": "qwen3_moe", "decoder_sparse_step": 2}', "layers of two kinds"),
        ('{"attention_bias": "no"}', "config's attention_bias: expected true or false, got 'no'"),
        ("{}", "this config, of model type .none., has no hidden_size"),
        ('{"hidden_size": "wide"}', "config's hidden_size: expected a positive int, got 'wide'"),
    ],
)
def test_wrong_configs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        memory.shape_of(tmp_path)


def test_the_weights_of_4_bits() -> None:
    """Equal to a real bitsandbytes model's weights, without its code tables."""
    bnb = pytest.importorskip("bitsandbytes")
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, vocab_size=500)
    model = LlamaForCausalLM(config).bfloat16()
    held = 0
    for layer in (module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)):
        options = {"quant_type": "nf4", "compress_statistics": True, "requires_grad": False}
        weight = bnb.nn.Params4bit(layer.weight.data, **options).to("cpu")
        state = weight.quant_state
        held += sum(part.nbytes for part in (weight.data, state.absmax, state.state2.absmax))
        layer.weight = None
    held += sum(weight.nbytes for weight in model.parameters())
    planned = memory.plan(config, seq_len=8, lora_rank=1, load_in_4bit=True)
    adapters = 4 * planned.shape.adapter_parameters(1)
    assert planned.peak.parts["weights"] - adapters == pytest.approx(held, rel=1e-4)


def test_liger_has_norms_for_them() -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel import transformers as liger

    of_liger = {name.removeprefix("apply_liger_kernel_to_") for name in liger.__all__}
    assert of_liger & set(ARCHS) == {name for name, arch in ARCHS.items() if arch.liger}


def test_whole_batches_over_gpus() -> None:
    """Ids, labels and positions of all tokens on every GPU, and for an image model the embeddings."""
    text = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    text |= {"intermediate_size": 2816, "vocab_size": 32000}
    length, setup = 2**17, {"gpus": 4, "sequence_parallel": 4}
    for config, embedded in ((text, 0), ({"model_type": "llava", "text_config": text}, length * 1024 * 2)):
        cut, whole = (memory.plan(config, seq_len=length, **setup, batches=batches) for batches in ("cut", "whole"))
        for before, after in zip(cut.moments, whole.moments, strict=True):
            more = embedded if before.name.startswith(("forward", "embedding")) else 0
            assert after.bytes - before.bytes == 3 * 8 * length + more, before.name
    alone = [memory.plan(text, seq_len=length, batches=batches).gpu_bytes for batches in ("cut", "whole")]
    assert alone[0] == alone[1]
    with pytest.raises(ValueError, match="batches: expected cut or whole, got 'half'"):
        memory.plan(text, seq_len=length, batches="half")


def test_shared_tokens() -> None:
    """Eight sequences of 32,000 tokens with a shared prefix of 30,000 are 46,000 tokens, whose layer inputs are kept,
    on one GPU or on four."""
    given = {"seq_len": 32_000, "batch_size": 8, "offload": ("activations",), "batches": "whole"}
    for gpus in (1, 4):
        over = given | {"gpus": gpus, "sequence_parallel": gpus}
        shared = memory.plan(LLAMA, shared_tokens=30_000, **over)
        assert shared.host["inputs"] == 31 * 46_000 * 4096 * 2
        assert memory.plan(LLAMA, **over).host["inputs"] == 31 * 256_000 * 4096 * 2
        one = {
            moment.name: moment.parts
            for moment in memory.plan(LLAMA, **over | {"seq_len": 46_000, "batch_size": 1}).moments
        }
        for moment in shared.moments:
            if "layer" in moment.name:
                assert [moment.parts[part] - one[moment.name][part] for part in ("mlp", "norms")] == [0, 0]
    assert memory.plan(LLAMA, **given, shared_tokens=0).moments == memory.plan(LLAMA, **given).moments


def test_calls_of_attention_with_shared_tokens() -> None:
    """Each query once, with the keys of its own sequence; no call has more keys than there are queries."""
    assert Batch(8, 32_000, 30_000, 1).calls() == [(30_000, 30_000), *[(2_000, 32_000)] * 8]
    assert Batch(4, 1200, 200, 1).calls() == [(3200, 3800), (1000, 1200)]
    assert Batch(8, 10, 8, 3).calls() == [(10, 18), (4, 20), (4, 20), (4, 20), (2, 10)]


def test_tokens_that_a_gpu_computes() -> None:
    """With a prompt shared over four GPUs, the first GPU has all of it and none of its labels."""
    assert Batch(8, 40, 24, 1)[:] == (8, 40, 24, 1)
    prompt = Batch(8, 40, 32, 4)
    assert (prompt.tokens, prompt.labelled) == (24, 24)


def test_the_longest_with_shared_tokens() -> None:
    """It fits and a longer one does not; it is 0 if not even one token beyond the shared ones fits."""
    given = {"batch_size": 8, "gpus": 2, "sequence_parallel": 2, "batches": "whole", "shared_tokens": 30_000}
    given |= {"offload": ("activations", "optimizer", "weights")}
    found = memory.longest(LLAMA, **given)
    assert found.tokens > 30_000 and found.tokens % 2 == 0
    fit, beyond = (memory.plan(LLAMA, seq_len=found.tokens + more, **given) for more in (0, 2))
    assert fit.fits and beyond.bound == found.bound
    assert memory.longest(LLAMA, **given | {"gpu_memory_gib": 8}).tokens == 0
    lengths = [longest.tokens for _, longest in memory.ladder(LLAMA, **given | {"offload": ("optimizer", "weights")})]
    assert max(lengths) > 30_000 and all(length > 30_000 for length in lengths if length)


def test_nodes() -> None:
    """Of keys attention holds those of a node's share of heads, of queries as many as on one node; a node receives what
    is counted by hand."""
    over = {"gpus": 16, "sequence_parallel": 16, "gpus_per_node": 8}
    plan, flat = (memory.plan(LLAMA, seq_len=16 * 8192, flat=flat, **over) for flat in (False, True))
    a_head = 16 * 8192 * 128 * 2
    more = a_head // 4  # keys of a node's early tokens, which its late tokens see, too
    expected = 2 * a_head, a_head + more, a_head + more  # 4 of 32 heads for half of the queries, 1 of 8 kv heads
    assert head_shares(plan.shape, plan.setup, 8192) == expected
    assert head_shares(plan.shape, flat.setup, 8192) == (2 * a_head, a_head, 2 * a_head)
    layers = plan.shape.layers
    assert plan.network.attention == 3 * layers * 8 * 2 * a_head / 2  # forward, again, backward; k and v of half of it
    assert flat.network.attention == plan.network.flat == 3 * plan.network.attention
    assert plan.network.weights == (2 * 2 + 4) * plan.shape.parameters / 2  # gathered twice; gradients in float32
    for setup in ({"gpus": 8}, {"gpus": 12, "sequence_parallel": 12}, {"gpus": 24, "sequence_parallel": 6}):
        uneven = memory.plan(LLAMA, seq_len=8192 * 12, **setup)
        assert uneven.network is None and uneven.setup.nodes.number == 1


def test_hsdp() -> None:
    """What FSDP2 shards is shared by a node's GPUs, and gradients alone cross, there and back."""
    hsdp, alone = (memory.plan(LLAMA, seq_len=8192, gpus=gpus, hsdp=gpus > 8) for gpus in (16, 8))
    assert hsdp.gpu_bytes == alone.gpu_bytes
    assert hsdp.network.weights == 2 * hsdp.shape.parameters * 4 / 2 and hsdp.network.attention == 0
    for setup, match in (
        ({"zero_stage": 2}, "zero_stage 3, as FSDP2 shards, got 2"),
        ({"offload": "optimizer"}, r"no optimizer or weights in offload, got \('optimizer',\)"),
        ({"gpus": 12}, "two or more whole nodes of 8 GPUs, got 12"),
        ({"gpus": 8}, "two or more whole nodes of 8 GPUs, got 8"),
        ({"lora_rank": 8, "load_in_4bit": True}, "load_in_4bit to be False, got True"),
    ):
        with pytest.raises(ValueError, match=f"hsdp: expected {match}"):
            memory.Setup(**{"gpus": 16, "hsdp": True} | setup)

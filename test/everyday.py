"""Which cases `make test` and `make test-gpu` run, and why the others can wait for `make test-all`, which runs all of
them (`--full`).

A test that is named nowhere here is run whole. Of the others, those cases are run that `keep` says:

EVERY_PAIR   as few as have every two values of two parameters together that are together in any case.
EVERY_VALUE  as few as have every value of every parameter.
a tuple      those whose id matches one of these patterns, with * for any text; of an empty one none.

What has the mark `full`, with its reason beside the case, is left to `make test-all` too. A case that was asked for by
its id is always run.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any, NamedTuple

EVERY_VALUE, EVERY_PAIR = 1, 2


class Cut(NamedTuple):
    """`tests`: beginnings of node ids, without test/."""

    tests: tuple[str, ...]
    keep: int | tuple[str, ...]
    why: str


_PLANS = "memory/test_against_simulation.py::test_"
_LAWS = "ops/test_head_laws.py::test_"
CUTS = (
    Cut(("test_fitting.py::test_a_type_without",), (), "20 s of simulation"),
    Cut(
        ("integrations/test_trl.py::test_same_training",),
        ("llama-*", "*-sft", "gemma2-dpo", "qwen3_moe-distillation"),
        "half a second each; what a model's head is to be given is the same for every trainer",
    ),
    Cut(
        (
            "ops/test_linear_divergence.py::test_values",
            "ops/test_linear_topk_divergence.py::test_values",
            "models/test_quantised.py::test_equals",
            "models/test_quantised.py::test_torchao_equals",
        ),
        EVERY_PAIR,
        "of 165 cases",
    ),
    Cut(
        ("ops/test_linear_divergence.py::test_random", "ops/test_linear_topk_divergence.py::test_random"),
        tuple("012345"),
        "of 40 draws, other ones in every run",
    ),
    Cut(("recipes/test_on_ranks.py::test_one_rank_holds",), (), "a model of 800 MB, and four processes"),
    Cut(
        ("memory/test_simulate.py::test_where",),
        ("llama",),
        "10 s each; the others go through the same lines",
    ),
    Cut(("memory/test_simulate.py::test_experts",), (), "likewise"),
    Cut(("bench/test_ledger.py::test_predictions",), (), "5 s of a page of predictions"),
    Cut(
        (
            "bench/test_run.py::test_what_a_file",
            "bench/test_gpu_tests.py::test_alone",
            "bench/test_gpu_tests.py::test_side",
        ),
        (),
        "10 to 20 s each of processes that start processes; make bench-smoke starts the same",
    ),
    Cut(("recipes/test_on_ranks.py::test_two_groups",), ("fsdp2",), "8 s; ZeRO-3 over groups is among the cases of sp"),
    Cut(
        tuple(f"models/test_families.py::test_{name}" for name in ("packed", "checkpointed", "lora", "bfloat16")),
        ("*gpt_oss*", "*qwen3_5_text*", "*deepseek_v3*"),
        "experts, layers of two kinds, and an attention of its own; half a second each",
    ),
    Cut(
        ("models/test_types.py::test_a_type", "models/test_small.py::test_every_kind"),
        ("*b", "*l", "*_text", "gpt_oss", "deepseek_v3", "phimoe"),
        "a tenth of the types and those that are most unlike; each takes a third of a second",
    ),
    Cut(
        ("models/test_first_step_types.py::test_no_false_alarm",),
        (
            "gpt2-float32",
            "bart-float16",
            "gpt_oss-bfloat16",
            "qwen3_moe-float16",
            "olmo2-autocast*",
            "deepseek_v3-*bfloat16",
        ),
        "of each type and precision, a second each",
    ),
    Cut(
        ("models/test_sweep.py::test_a_type",),
        ("llama", "gpt2", "olmo2", "gemma2", "bloom"),
        "2 to 60 s each of some thirty variants",
    ),
    Cut(("recipes/test_check.py::test_every_type",), ("gpt2", "gemma4_assistant"), "1 to 30 s each"),
    Cut(
        (f"{_PLANS}every_architecture",),
        ("*-liger", "llama-plain", "gemma2-plain", "qwen3_moe-plain"),
        "a layer's own parts weigh more under Liger's norms",
    ),
    Cut((f"{_PLANS}layers_tiled_as_a_whole[",), EVERY_VALUE, "5 s each by groups, which go through the same lines"),
    Cut(
        (f"{_PLANS}every_feature",),
        (
            "2-plain",
            "5-*",
            "16-*",
            "64-offload-*",
            "64-lora_rank",
            "32-dtype",
            "0-gpus-*",
            "512-gpus-sequence_parallel",
            "8-lora_rank-load_in_4bit",
        ),
        "each feature alone; a simulation of several together takes seconds",
    ),
    Cut(
        (f"{_PLANS}layers_tiled_as_a_whole_with_every_feature",),
        (
            "6144-*",
            "65536-*'gpus': 8, 'offload*",
            "32768-*",
            "524288-*'sequence_parallel': 8}",
        ),
        "likewise",
    ),
    Cut(("kernels/test_divergence.py::test_values",), EVERY_PAIR, "of 216 cases of one kernel's twin"),
    Cut(("models/test_layer.py::test_compiled",), (), "10 s of compiler; make test-all compiles whole layers"),
    Cut((f"{_PLANS}float32_weights_under",), EVERY_VALUE, "of 32 cases, seconds each"),
    Cut(
        (f"{_PLANS}autocast_with", f"{_PLANS}autocast_of"),
        ("*'tiles': ()}", "*'head_groups': 'auto'}", "gemma2"),
        "likewise; half of a layer's parts are those of a plan without autocast",
    ),
    Cut((f"{_PLANS}many_layers_over_gpus",), (), "15 s of simulation; layers are planned one like the other"),
    Cut((f"{_PLANS}a_whole_model", f"{_PLANS}groups_of_heads"), ("llama-2-*",), "likewise, 10 s each"),
    Cut(
        tuple(f"{_PLANS}{name}" for name in ("heads", "attention_of_a_group", "over_gpus", "adapters")),
        ("4", "llama", "layer", "gemma2", "qwen3_moe", "granite"),
        "one number of ranks, one architecture or two of several",
    ),
    Cut(
        ("kernels/test_compiled.py::test_nothing",),
        ("sm_90-*-bf16", *(f"sm_90-{name}-fp*" for name in ("loss_llama", "gated_silu", "norm_4096", "rotary"))),
        "the GPU that is measured on, in the dtype that is trained in; make test-all compiles for three others too",
    ),
    Cut(
        (f"{_LAWS}memory_of_the_eager_twin",),
        ("dtype1-mean",),
        "10 s each; the kernels' twins are tested by themselves",
    ),
    Cut(
        (f"{_LAWS}memory", "ops/test_mlp_laws.py::test_memory", "ops/test_metrics_gradients.py::test_memory"),
        EVERY_VALUE,
        "sizes, dtypes and reductions by themselves: the buffers of one do not depend on the other",
    ),
    Cut(
        ("models/test_layer_laws.py::test_tensors_alive_at_a_million_tokens",),
        ("None-*",),
        "16 s; groups are seen at 128K tokens",
    ),
    Cut(("models/test_layer_laws.py::test_products_at_full_size",), ("qwen3-auto", "llama-None"), "of four, 2 s each"),
    Cut(
        ("models/test_trl.py::test_same_training_of_other_kinds",),
        ("completions-trl*", "packed-seqtile*", "padding-free-trl*", "reentrant-seqtile*"),
        "what TRL does to a batch is over before any line of ours",
    ),
    Cut(
        (
            "models/test_trl.py::test_same_training_as",
            "models/test_trl.py::test_lora",
            "models/test_trl.py::test_bfloat16",
        ),
        ("llama-model-trl*", "phi3-classes-seqtile*", "classes-seqtile*", "trl*"),
        "each trainer costs seconds; how a model was tiled is tested without TRL",
    ),
    Cut(
        ("recipes/test_on_ranks.py::test_a_real_model",),
        (),
        "two minutes; 9 heads over ranks are among the cases of sp",
    ),
    Cut(("recipes/test_on_ranks.py::test_torchrun",), (), "17 s to start; forked ranks are interrupted"),
    Cut(("test_package.py::test_wheel",), (), "minutes: an empty environment, to which pip brings torch"),
    Cut(
        ("examples/test_examples.py::test_ranks",),
        ("fsdp2_sp-forked", "trainer_sp-forked"),
        "30 s by torchrun, of forked ranks the lines are the same; 11 s of DeepSpeed, with which sp's cases train too",
    ),
    Cut(("recipes/test_finetune.py::test_ended_early",), (), "20 s each; test_on_ranks.py interrupts a rank"),
    Cut(("recipes/test_finetune.py::test_no_mask",), ("gemma3_text",), "it has the layers of both others"),
    Cut(("recipes/test_documents.py::test_pieces",), ("unigram", "words", "lines"), "SmolLM2's tokenizer takes 5 s"),
    Cut(("bench/test_run.py::test_time_that_is_up",), (), "7 s; smoke runs have no deadline"),
    Cut(("bench/test_missing.py::test_the_peak",), ("700-*",), "of three lengths"),
    Cut(
        ("models/test_liger_orders.py::test_order",),
        (
            "llama-liger, seqtile, build",
            "*build, liger model, seqtile",
            "mistral-*",
            "*liger, build, seqtile model",
        ),
        "2 s each; every answer of status and every way back are among these",
    ),
    Cut(("models/test_liger_orders.py::test_trainer",), ("model", "llama-classes"), "likewise"),
    Cut(("models/test_step_in_backward.py::test_steps",), EVERY_PAIR, "of 81 cases"),
    Cut(("sp/test_documents.py::test_memory_does_not",), EVERY_PAIR, "of 24 cases"),
    Cut(
        (
            "models/test_training_loops.py::test_compiled_layers",
            "ops/test_linear_cross_entropy.py::test_compiles_in_one",
        ),
        ("llama", "layer.compile-False", "dynamic"),
        "10 s of compiler each, of the same graph",
    ),
    Cut(("bench/test_ladder.py::test_what_runs_is_right",), ("seqtile_loss_mlp",), "each method asks it of itself"),
)
INTERPRETED = (  # where a row of a kernel takes a millisecond
    Cut(("kernels/test_compiled.py",), (), "the interpreter replaces the compiler"),
    Cut(
        ("kernels/test_cross_entropy.py::test_values_and_gradient", "kernels/test_divergence.py::test_values"),
        EVERY_PAIR,
        "of 396 cases of two kernels",
    ),
    Cut(("kernels/",), ("*",), "every kernel"),
    Cut(
        ("ops/test_linear_cross_entropy.py::test_loss_and_gradients",),
        ("63-16-dtype0-*sum*", "190-63-dtype0-*none*", "190-63-dtype1-*num*", "190-63-dtype2-{}"),
        "one end-to-end case of each op and dtype",
    ),
    Cut(("ops/test_gated_mlp.py::test_output_and_grad",), ("63-16-dtype0", "190-63-*"), "likewise"),
    Cut(
        ("ops/test_linear_divergence.py::test_random", "ops/test_linear_topk_divergence.py::test_random"),
        ("0",),
        "likewise",
    ),
    Cut(
        (
            "ops/test_rms_norm.py::test_output",
            "ops/test_linear_log_probs.py::test_policy",
            "ops/test_gated_mlp_options.py::test_output",
            "ops/test_tiled_state.py::test_meta",
        ),
        EVERY_VALUE,
        "likewise",
    ),
    Cut(
        ("ops/test_metrics_gradients.py::test_gradients",),
        ("dtype0-loss z entropy-mean", "dtype1-loss z-sum", "dtype2-loss entropy-none"),
        "likewise",
    ),
    Cut(
        ("models/test_gradients.py::test_gradients_equal",),
        ("llama-liger-plain-1-63-None", "mistral-hf-reentrant-1-63-None", "qwen3-liger-ckpt-1-63-None"),
        "one model of each kind, and Liger's kernels in the same one",
    ),
    Cut(
        ("models/test_layer_gradients.py::test_gradients_equal", "models/test_layer_gradients.py::test_after_liger"),
        ("llama-2-ckpt-1-101", "qwen3-None-ckpt-1-101", "llama-2", "qwen3-None"),
        "likewise of tiled layers",
    ),
    Cut(("",), (), "the eager twins meet the same cases"),
)

ON_GPU = (  # that are asked before CUTS: of what takes a device, since nothing else runs there
    Cut(("kernels/test_divergence.py::test_values",), ("*",), "every case of a kernel"),
    Cut(
        ("models/test_gradients.py::test_gradients_equal", "models/test_layer_gradients.py::test_gradients_equal"),
        EVERY_PAIR,
        "of 444 models; a CPU trains all of them by the same lines, and each kernel has its own tests",
    ),
    Cut(("models/test_layer.py", "models/test_training_loops.py"), EVERY_VALUE, "likewise"),
    Cut(
        ("models/test_forward.py",),
        ("*cohere*", "*gemma2*", "*qwen3_moe*"),
        "what a model returns for which arguments is decided by the host; with a scale, a cap and experts",
    ),
    Cut(("memory/test_on_gpu.py",), EVERY_PAIR, "4 s each of one process"),
    Cut(("ops/test_metrics_gradients.py::test_gradients",), EVERY_PAIR, "of 45; the kernel's test has every output"),
    Cut(
        ("ops/test_head_inputs.py::test_targets", "ops/test_head_inputs.py::test_losses_of"),
        EVERY_PAIR,
        "converted and reshaped before any kernel runs",
    ),
    Cut(
        ("models/test_state_of_modules.py", "ops/test_tiled_state.py", "ops/test_tiled_trial.py"),
        EVERY_VALUE,
        "refused before any kernel runs",
    ),
    Cut(
        ("sp/test_on_gpu.py::test_one_rank_of_nccl",),
        ("*, packed", "gqa*", "flex 6/3, padded, window", "long*", "dynamic*"),
        "a GPU has its own attentions and collectives; of masks the documents are the most",
    ),
)


def everyday(items: Sequence, cuts: tuple[Cut, ...]) -> set[str]:
    """Ids of the items to run. Raises ValueError for a cut that says nothing."""
    cases: dict[tuple[Cut, str], list] = defaultdict(list)
    kept = set()
    for item in items:
        cut = next((cut for cut in cuts if item.nodeid.startswith(tuple("test/" + test for test in cut.tests))), None)
        if cut is None or (cut.keep and not hasattr(item, "callspec")):
            kept.add(item.nodeid)
        elif cut.keep:
            cases[cut, item.nodeid.partition("[")[0]].append(item)
    for (cut, _), found in cases.items():
        if isinstance(cut.keep, int):
            kept |= {found[i].nodeid for i in covering([together(item.callspec.params, cut.keep) for item in found])}
        else:
            kept |= {item.nodeid for item in found if any(fnmatchcase(item.callspec.id, p) for p in cut.keep)}
    return kept


def together(case: dict[str, Any], number: int) -> set[tuple]:
    """Of a case, parameter -> value: every so many of them."""
    return set(combinations([(name, repr(case[name])) for name in sorted(case)], min(number, len(case))))


def covering(cases: list[set]) -> list[int]:
    """Which of the cases to take, so that everything that any of them has is in one that is taken: always the one that
    has most that is new, the first of several."""
    missing, chosen = set().union(*cases), []
    while missing:
        chosen.append(max(range(len(cases)), key=lambda i: len(cases[i] & missing)))
        missing -= cases[chosen[-1]]
    return chosen


def unused(items: Iterable, cuts: tuple[Cut, ...]) -> list[str]:
    """Tests that a cut names, in files of `items`, and that are not there."""
    ids = [item.nodeid for item in items]
    files = {name.partition("::")[0] for name in ids}
    named = ("test/" + test for cut in cuts for test in cut.tests)
    named = (test for test in named if test.partition("::")[0] in files)
    return [test for test in named if not any(name.startswith(test) for name in ids)]

"""The test cases over ranks: kinds of heads, kinds of sequences, gradient reducers."""

from collections import Counter
from collections.abc import Iterator

import torch

from seqtile.arch import ARCHS
from seqtile.attention.varlen import register
from support.tiny import VOCAB

HEADS = {  # architecture and shape: query heads / kv heads
    "mha 4/4": ("qwen2", {"num_key_value_heads": 4}),
    "gqa 4/2": ("qwen3", {"num_key_value_heads": 2}),
    "mqa 4/1": ("qwen2", {"num_key_value_heads": 1}),
    "odd 9/3": ("qwen2", dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3)),
    "few 2/1": ("mistral", dict(num_attention_heads=2, num_key_value_heads=1, head_dim=12, sliding_window=None)),
    "one 1/1": ("qwen3", dict(num_attention_heads=1, num_key_value_heads=1)),
    "eager, soft cap": ("gemma2", dict(attn_implementation="eager", attn_logit_softcapping=2.0)),
    "three 3/3": ("gemma3_text", dict(num_attention_heads=3, num_key_value_heads=3)),
    "flash 4/2": ("mistral", dict(num_key_value_heads=2, sliding_window=None)),
    "flash 2/1": ("qwen2", dict(num_attention_heads=2, num_key_value_heads=1)),
    "flex 6/3": ("qwen3", dict(num_attention_heads=6, num_key_value_heads=3, head_dim=16)),  # on a GPU no fewer
    "varlen 4/2": ("qwen3", dict(num_key_value_heads=2)),
}
_ROPE = dict(rope_theta=10000.0, factor=4.0, original_max_position_embeddings=40)
LONG_ROPE = _ROPE | dict(rope_type="longrope", short_factor=[1.0] * 6, long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_PHI3 = dict(rope_parameters=LONG_ROPE, max_position_embeddings=160, original_max_position_embeddings=60)
ROTARY = {  # their angles depend on the whole length, which exceeds the original length on the last rank
    "long": ("phi3", _PHI3),
    "dynamic": ("llama", dict(rope_parameters=_ROPE | {"rope_type": "dynamic"}, max_position_embeddings=40)),
}
WRAPPED = {"flash": "flash_attention_3", "flex": "flex_attention", "varlen": register("sdpa")}
_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}
_NAMES = ("plain", "ragged", "packed", "window", "packed, window", "padded", "padded, window", "mostly padding")
KINDS = {kind: _WINDOW if "window" in kind else {} for kind in _NAMES}
"""Changes to the configuration, for architectures that support them."""
REDUCERS = {"torch": ("ddp", "fsdp2"), "zero": ("zero0", "zero1", "zero2"), "zero3": ("zero3", "zero3_all_reduce")}
LAYER_REDUCERS = {"fsdp2": None, "zero2": 2, "zero3": 2}  # also with whole layers tiled: head chunks


def reducer_cases(family: str) -> Iterator[tuple[str, str, dict, bool]]:
    """Yields models, reducers, the options of seqtile, and whether the case runs every day."""
    found = [(strategy, {}) for strategy in REDUCERS[family]]
    layers = {name: groups for name, groups in LAYER_REDUCERS.items() if name in REDUCERS[family]}
    found += [(name, {"layer": True, "head_groups": groups}) for name, groups in layers.items()]
    for strategy, options in found:
        yield "llama", strategy, options, strategy == ("zero3" if options else "fsdp2")
    for model, every_day in (("qwen3_5", "ddp"), ("gpt_oss", "")):
        for strategy in REDUCERS[family]:
            if strategy not in ("zero0", "zero3_all_reduce"):
                yield model, strategy, {}, strategy == every_day


def attention_cases() -> list[tuple[str, str, str, dict]]:
    """Name, kind of sequence, architecture and configuration: every kind of heads with every kind of sequence, and
    every architecture."""
    found = [(heads, kind, arch, shape | KINDS[kind]) for heads, (arch, shape) in HEADS.items() for kind in KINDS]
    found += [(name, "plain", arch, shape) for name, (arch, shape) in ROTARY.items()]
    soft_cap = {"gemma2": {"attn_implementation": "eager"}}
    return found + [(arch, "packed", arch, soft_cap.get(arch, {})) for arch in ARCHS]


LAYERS = (  # heads, kind of sequence, head chunks with tiled layers; whether attention is recomputed
    ("gqa 4/2", "plain", None, False),
    ("odd 9/3", "packed, window", None, False),
    ("mha 4/4", "plain", "auto", False),
    ("mha 4/4", "packed", 2, True),
    ("gqa 4/2", "window", 2, True),
    ("gqa 4/2", "plain", 2, False),
    ("odd 9/3", "ragged", 3, True),
    ("flash 4/2", "packed", 2, True),
    ("flash 2/1", "mostly padding", 1, True),
    ("flex 6/3", "packed", 3, True),
    ("few 2/1", "padded", 1, True),
    ("varlen 4/2", "packed, window", 2, True),
    ("mha 4/4", "mostly padding", 4, True),
)


def layer_cases() -> list[tuple[str, str, str, dict, int | str | None, bool]]:
    return [
        (f"layer {heads}", kind, HEADS[heads][0], HEADS[heads][1] | KINDS[kind], groups, repeats)
        for heads, kind, groups, repeats in LAYERS
    ]


def on_ranks(count: int, cases: list[tuple]) -> list[tuple]:
    """Returns which cases run every day on this many ranks. On one rank two; of the product of heads and kinds a
    sixteenth on two ranks and a quarter as many on four; of the others an eighth on two."""
    if count == 1:
        return cases[:: 8 * len(HEADS) - 6]
    times = Counter(heads for heads, *_ in cases)
    periods = [len(KINDS) * count**2 // 2 if times[heads] > 1 else 8 for heads, *_ in cases]
    found = [(i + i // len(KINDS)) % period == (count > 2) * 13 % period for i, period in enumerate(periods)]
    is_rare = [count > 2 and times[heads] == 1 for heads, *_ in cases]
    return [case for case, is_run, rare in zip(cases, found, is_rare, strict=True) if is_run and not rare]


def batch_of_kind(kind: str) -> dict[str, torch.Tensor]:
    """A whole batch with a masked prompt in every row."""
    rows, length = (3, 96) if "padded" in kind else (1, 101 if kind == "ragged" else 96)
    ids = torch.randint(3, VOCAB, (rows, length))
    labels = ids.clone()
    labels[:, :9] = -100
    batch = {"input_ids": ids, "labels": labels, "use_cache": False}
    if "padded" in kind:  # on the left, on the right, and not at all
        mask = torch.ones_like(ids)
        mask[0, :13] = 0
        mask[1, 70:] = 0
        labels[mask == 0] = -100
        labels[0, :20] = -100
        batch["attention_mask"] = mask
    if kind == "mostly padding":  # all queries of a rank that shares a head may be padding
        batch["attention_mask"] = (torch.arange(length) < 11).long()[None]
        labels[0, 11:] = -100
    if "packed" in kind:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (17, 50, 1, 28)])[None]
        labels[0, [17, 67, 68]] = -100  # no document's first token is the label of another's last
    return batch

"""Models of images and text over ranks, which are given whole batches, against one process."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqtile
from distributed.worker import STRATEGIES, full
from seqtile import sp
from seqtile.sp import segments
from sp.over_ranks import assert_same_gradients, by_first_rank, context
from support.assertions import relative_error
from support.tiny import loss_and_gradients
from support.training import update

IMAGE, LENGTH, WORDS = 5, 45, 211
_TEXT = dict(vocab_size=WORDS, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
_TEXT |= dict(num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0)
_HEADS = _TEXT | {"head_dim": 12}
_AXES = {"rope_parameters": dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 2])}
_VIT = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
_MERGED = dict(hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=48, patch_size=2)
_MERGED |= dict(spatial_merge_size=2, temporal_patch_size=1)
_TOKENS = dict(image_token_id=IMAGE, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
_OF_GLM = dict(image_start_token_id=7, image_end_token_id=8, video_start_token_id=9, video_end_token_id=4)
_DEEPSTACK = _MERGED | dict(depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
_QWEN35 = _TEXT | dict(head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2)
_QWEN35 |= dict(linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
_QWEN35["rope_parameters"] = _AXES["rope_parameters"] | dict(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[])
_GEMMA4 = dict(global_head_dim=12, use_bidirectional_attention="vision", hidden_size_per_layer_input=8)
_GEMMA4 |= dict(vocab_size_per_layer_input=WORDS, num_kv_shared_layers=0, sliding_window=16)
_GEMMA4["layer_types"] = ["sliding_attention", "full_attention"]
_GEMMA4_VIT = _VIT | dict(num_key_value_heads=2, head_dim=16, patch_size=4, pooling_kernel_size=2)
Inputs = dict[str, Tensor]


def of_unequal_size(ids: Tensor) -> Inputs:
    """Three images of 8, 8 and 4 tokens, two of them in the first row, as patches one behind the other."""
    grid = torch.tensor([[1, 4, 8], [1, 8, 4], [1, 4, 4]])
    for row, start, size in ((0, 3, 8), (0, 20, 8), (1, 11, 4)):
        ids[row, start - 1], ids[row, start : start + size] = 7, IMAGE
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 2)
    return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}


def of_four_tokens(ids: Tensor) -> Inputs:
    """Three images of 8 x 8 pixels, two of them in the first row."""
    for row, start in ((0, 3), (0, 20), (1, 11)):
        ids[row, start : start + 4] = IMAGE
    return {"pixel_values": torch.randn(3, 3, 8, 8)}


def with_kinds(ids: Tensor) -> Inputs:
    return of_four_tokens(ids) | {"token_type_ids": (ids == IMAGE).long()}


def with_sizes(ids: Tensor) -> Inputs:
    for row, start, size in ((0, 3, 8), (0, 20, 4), (1, 11, 4)):
        ids[row, start : start + size] = IMAGE
    return {"pixel_values": torch.randn(3, 3, 8, 16), "image_sizes": torch.tensor([[8, 16], [8, 8], [8, 8]])}


def with_prefixes(ids: Tensor) -> Inputs:
    """An image and a prompt before what is to be predicted, which see each other both ways."""
    ids[:, :4] = IMAGE
    kinds = (torch.arange(LENGTH) >= 14).long().expand(len(ids), -1).contiguous()
    return {
        "pixel_values": torch.randn(len(ids), 3, 8, 8),
        "token_type_ids": kinds,
        "attention_mask": torch.ones_like(ids),
    }


def with_places(ids: Tensor) -> Inputs:
    of_four_tokens(ids)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)
    inputs = {"pixel_values": torch.randn(3, 16, 48), "image_position_ids": places.repeat(3, 1, 1)}
    return inputs | {"mm_token_type_ids": (ids == IMAGE).long()}


def _parts(text: dict, vision: dict, **others: Any) -> dict:
    return {"text_config": text, "vision_config": vision} | others


MODELS: dict[str, tuple[dict, Callable[[Tensor], Inputs]]] = {  # model type: configuration, and what makes its images
    "qwen2_5_vl": (
        _parts(_TEXT | _AXES, _MERGED | dict(depth=2, window_size=8, fullatt_block_indexes=[1]), **_TOKENS),
        of_unequal_size,
    ),
    "qwen3_vl": (_parts(_HEADS | _AXES, _DEEPSTACK, **_TOKENS), of_unequal_size),
    "qwen3_vl_moe": (_parts(_HEADS | _AXES | _EXPERTS, _DEEPSTACK, **_TOKENS), of_unequal_size),
    "qwen3_5": (
        _parts(_QWEN35, _MERGED | dict(depth=2, num_position_embeddings=16), **_TOKENS),
        of_unequal_size,
    ),
    "glm4v": (_parts(_TEXT | _AXES, _MERGED | dict(depth=2, image_size=16), **_TOKENS, **_OF_GLM), of_unequal_size),
    "llava": (
        _parts(
            {"model_type": "llama"} | _TEXT,
            {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4} | _VIT,
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        of_four_tokens,
    ),
    "mistral3": (
        _parts(
            {"model_type": "mistral"} | _HEADS,
            {"model_type": "pixtral", "image_size": 16, "patch_size": 2, "head_dim": 16} | _VIT,
            image_token_index=IMAGE,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        ),
        with_sizes,
    ),
    "internvl": (
        _parts(
            {"model_type": "qwen2"} | _TEXT,
            _VIT | {"image_size": [8, 8], "patch_size": [2, 2]},
            image_token_id=IMAGE,
            image_seq_length=4,
            downsample_ratio=0.5,
        ),
        of_four_tokens,
    ),
    "gemma3": (
        _parts(
            _HEADS | {"sliding_window": 16},
            _VIT | {"image_size": 8, "patch_size": 2},
            image_token_index=IMAGE,
            mm_tokens_per_image=4,
        ),
        with_kinds,
    ),
    "gemma4": (
        _parts(_HEADS | _GEMMA4, _GEMMA4_VIT, audio_config=None, audio_token_id=7, **_TOKENS),
        with_places,
    ),
    "paligemma": (
        _parts(
            {"model_type": "gemma2", "sliding_window": 64, "query_pre_attn_scalar": 12} | _HEADS,
            {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4} | _VIT,
            image_token_index=IMAGE,
            projection_dim=48,
            hidden_size=48,
        ),
        with_prefixes,
    ),
}


def made(model_type: str) -> tuple[nn.Module, Inputs]:
    """A small model, and a batch of three rows with labels, the last without images where a model takes such."""
    fields, images = MODELS[model_type]
    config = transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(fields))
    model = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            many = parameter.dim() > 1 and parameter.any()  # a projector may begin with zeros
            parameter.mul_(3) if many else parameter.add_(torch.randn_like(parameter) * 0.1)
    ids = torch.randint(10, WORDS, (3, LENGTH))
    batch = {"input_ids": ids} | images(ids)
    return model, batch | {"labels": ids.masked_fill(ids < 10, -100)}


class Shapes(TorchDispatchMode):
    """The last two dimensions of all that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen |= {
            tuple(each.shape[-2:]) for each in torch.utils._pytree.tree_leaves(found) if hasattr(each, "shape")
        }
        return found


@contextmanager
def small_masks() -> Iterator[None]:
    """Blocks of few queries, so that none is a whole mask."""
    before, segments.MASK_ELEMENTS = segments.MASK_ELEMENTS, 200
    try:
        yield
    finally:
        segments.MASK_ELEMENTS = before


def compared(model_type: str, options: dict | None, frozen: bool) -> None:
    """A step with images: loss and gradients, in the vision tower, the projector, the embeddings and the text model."""
    ctx = context()
    one, batch = made(model_type)
    if frozen:
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("language_model" in name or "lm_head" in name)
    expected = by_first_rank(loss_and_gradients, one, **batch)
    negligible = 1e-5 * max(gradient.norm() for gradient in expected[1].values() if gradient is not None)
    told = {
        name: g for name, g in expected[1].items() if g is not None and g.norm() > negligible
    }  # keys' biases are not
    many = copy.deepcopy(one)
    sp.apply_ulysses(many, ctx, batches="whole")
    if options is not None:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options)
    with small_masks(), Shapes() as shapes:
        loss = many(**batch).loss
    assert (LENGTH, LENGTH) not in shapes.seen, "a mask of length x length"
    loss.backward()
    assert relative_error(loss.detach(), expected[0]) <= 1e-5
    assert_same_gradients(many, told, lambda model: loss_and_gradients(model, **batch), one, model_type)
    assert frozen or any("vis" in name for name in told)
    without_images(one, many)


def without_images(one: nn.Module, many: nn.Module) -> None:
    """Text alone, and words that are generated."""
    ids = torch.randint(10, WORDS, (2, LENGTH))
    with torch.no_grad():
        inputs = {"input_ids": ids, "labels": ids}
        if "gemma3" in one.config.model_type or "paligemma" in one.config.model_type:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        assert torch.allclose(many(**inputs).loss, one(**inputs).loss, rtol=1e-5)
        words = [model.eval().generate(ids[:1, :9], max_new_tokens=2, do_sample=False) for model in (one, many)]
    assert words[0].equal(words[1])


def refused() -> None:
    """Spans of images with flash attention, whose masks have none; batches that are not the same; cached prompts."""
    ctx = context()
    model, batch = made("gemma3")
    model.set_attn_implementation({"text_config": "eager"})
    sp.apply_ulysses(model, ctx, batches="whole")
    assert model(**batch).loss.isfinite()
    other = batch | {"pixel_values": batch["pixel_values"] + ctx.rank}
    with pytest.raises(ValueError, match="expected the same whole batch on every rank of a group"):
        model(**other)
    sp.restore(model)
    assert model.model.language_model.config._attn_implementation == "eager"


def batch_of_group(model_type: str, group: int) -> Inputs:
    torch.manual_seed(group)
    return made(model_type)[1]


def by_one_process(model: nn.Module, model_type: str, groups: int) -> tuple[float, dict[str, Tensor]]:
    """A step over the mean of the groups' losses; that loss, and the weights that are trained."""
    losses = [model(**batch_of_group(model_type, group)).loss / groups for group in range(groups)]
    sum(losses).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.optim.SGD(trained.values(), lr=1.0).step()
    return float(sum(losses)), {name: parameter.detach() for name, parameter in trained.items()}


def reduced(model_type: str, strategy: str, frozen: bool) -> None:
    """A step of two groups of two ranks, each with images of its own: every weight moves as in one process, inside of
    the text model and outside of it."""
    ctx = context(2)
    torch.manual_seed(9)
    one = made(model_type)[0]
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.mul_(0.3 if parameter.dim() > 1 else 1)  # one step of SGD must not overflow
            parameter.requires_grad_(not frozen or "language_model" in name or "lm_head" in name)
    many, start = copy.deepcopy(one), full(one)
    loss, weights = by_first_rank(by_one_process, one, model_type, ctx.data_parallel_size)
    sp.apply_ulysses(many, ctx, batches="whole")
    seqtile.apply_seqtile(many, chunk_tokens=11)
    wrapped, optimizer = STRATEGIES[strategy](many)
    ours = wrapped(**batch_of_group(model_type, ctx.data_parallel_rank)).loss
    update(wrapped, optimizer, ours)
    total = ours.detach().clone()
    dist.all_reduce(total)
    assert relative_error(total / dist.get_world_size(), torch.tensor(loss)) <= 1e-5
    found, moves = full(many), {name: weights[name] - start[name] for name in weights}
    most = max(move.norm() for move in moves.values())
    for name, move in moves.items():
        error, allowed = (found[name] - weights[name]).norm(), 1e-5 * move.norm() + 2**-23 * weights[name].norm()
        assert error <= allowed + 1e-7 * most, f"of {name} {error:.1e} off {move.norm():.1e}"
    assert any(move.norm() > 0 for move in moves.values())
    if wrapped is optimizer:
        wrapped.destroy()

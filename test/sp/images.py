"""Models of images and text over ranks that get whole batches, against one process."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from seqtile.attention import segments
from sp.over_ranks import Step, assert_same_gradients, averaged, by_first_rank, context
from sp.whole import COLLECTIVES, counted
from support.assertions import relative_error
from support.tiny import loss_and_gradients
from support.training import update

IMAGE, VIDEO, LENGTH, WORDS = 5, 6, 45, 211
_TEXT = dict(vocab_size=WORDS, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
_TEXT |= dict(num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0)
_HEADS = _TEXT | {"head_dim": 12}
_AXES = {"rope_parameters": dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 2])}
_VIT = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
_MERGED = dict(hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=48, patch_size=2)
_MERGED |= dict(spatial_merge_size=2, temporal_patch_size=1)
_TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=7, vision_end_token_id=8)
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
DEALT = {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "llava", "internvl", "gemma3", "paligemma"}
"""Types whose images are distributed over ranks."""
NONE_MORE = dict.fromkeys((*COLLECTIVES, "gathered bytes", "reduced bytes"), 0)
Inputs = dict[str, Tensor]


def of_unequal_size(ids: Tensor) -> Inputs:
    """Three images of 8, 8 and 4 tokens, two of them in the first row, as concatenated patches."""
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
    """An image and a prompt before the labels; their tokens see each other in both directions."""
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


def _of_videos(ids: Tensor, are_apart: bool) -> Inputs:
    """Videos of 2, 2 and 1 frames, two of them in the first row, and an image in the last. Frames are adjacent, or have
    a token between them."""
    for row, start, size, frames in ((0, 3, 4, 2), (0, 18, 8, 2), (1, 11, 4, 1)):
        ids[row, start - 1] = 7
        for first in range(start, start + frames * (size + are_apart), size + are_apart):
            ids[row, first : first + size] = VIDEO
            if are_apart:
                ids[row, first - 1] = 7
    ids[2, 4], ids[2, 5:9] = 7, IMAGE
    inputs = {"pixel_values": torch.randn(16, 12), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    inputs |= {"pixel_values_videos": torch.randn(112, 12)}
    inputs |= {"video_grid_thw": torch.tensor([[2, 4, 4], [2, 4, 8], [1, 4, 4]])}
    return inputs | {"mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}


def of_videos(ids: Tensor) -> Inputs:
    return _of_videos(ids, False)


def of_frames(ids: Tensor) -> Inputs:
    return _of_videos(ids, True)


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


VIDEOS = {f"{name} videos": (MODELS[name][0], of) for name, of in (("qwen2_5_vl", of_videos), ("qwen3_vl", of_frames))}
"""The same types with videos."""


def made(model_type: str, times: int = 1) -> tuple[nn.Module, Inputs]:
    """A small model, and a batch of three rows with labels, repeated `times` times. The last row has no images if the
    model allows that."""
    fields, images = (MODELS | VIDEOS)[model_type]
    config = transformers.CONFIG_MAPPING[model_type.split()[0]](**copy.deepcopy(fields))
    model = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            many = parameter.dim() > 1 and parameter.any()  # a projector may start with zeros
            parameter.mul_(3) if many else parameter.add_(torch.randn_like(parameter) * 0.1)
    batches = []
    for _ in range(times):
        ids = torch.randint(10, WORDS, (3, LENGTH))
        batches.append({"input_ids": ids} | images(ids))
        batches[-1]["labels"] = ids.masked_fill(ids < 10, -100)
    return model, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


class Shapes(TorchDispatchMode):
    """Records the last two dimensions of all results inside."""

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
    """Small blocks of queries, so that none is a whole mask."""
    before, segments.MASK_ELEMENTS = segments.MASK_ELEMENTS, 200
    try:
        yield
    finally:
        segments.MASK_ELEMENTS = before


def compared(model_type: str, options: dict | None, frozen: bool, times: int = 1) -> bool:
    """Compares a step with images: loss and gradients in the vision tower, projector, embeddings and text model.
    Returns whether images were distributed."""
    ctx = context()
    one, batch = made(model_type, times)
    if frozen:
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("language_model" in name or "lm_head" in name)
    expected = by_first_rank(loss_and_gradients, one, **batch)
    negligible = 1e-5 * max(gradient.norm() for gradient in expected[1].values() if gradient is not None)
    told = {
        name: g for name, g in expected[1].items() if g is not None and g.norm() > negligible
    }  # gradients of key biases are zero
    many = copy.deepcopy(one)
    sp.apply_ulysses(many, ctx, batches="whole")
    if options is not None:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options)
    with small_masks(), Shapes() as shapes, dealing() as dealt:
        loss = many(**batch).loss
    assert (LENGTH, LENGTH) not in shapes.seen, "a mask of length x length"
    assert relative_error(loss.detach(), expected[0]) <= 1e-5
    loss.backward()
    assert_same_gradients(many, told, lambda model: loss_and_gradients(model, **batch), one, model_type)
    assert frozen or any("vis" in name for name in told)
    without_images(one, many)
    return bool(dealt)


def is_right(model_type: str) -> tuple[bool, bool]:
    """Whether a step equals that of one process, and whether images were distributed."""
    try:
        return True, compared(model_type, None, False, times=2)
    except AssertionError:
        return False, False


def balanced() -> None:
    """The loss that balances experts, over all ranks' tokens except padding."""
    ctx, (one, batch) = context(), made("qwen3_vl_moe")
    one.double().set_experts_implementation("eager")
    one.config.text_config.router_aux_loss_coef = 0.5
    batch["pixel_values"] = batch["pixel_values"].double()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][2, :5], batch["labels"][2, :5] = 0, -100
    batch["output_router_logits"] = True
    expected = by_first_rank(loss_and_gradients, one, **batch)
    balance = one(**batch).aux_loss.detach()
    one.zero_grad()
    sp.apply_ulysses(many := copy.deepcopy(one), ctx, batches="whole")
    output = many(**batch)
    output.loss.backward()
    assert relative_error(output.aux_loss.detach(), balance) <= 1e-6
    assert any(name.endswith("gate.weight") for name in expected[1])
    assert_same_in_float64(output.loss, many, expected, "balanced")
    assert [each.shape for each in output.router_logits] == [(3 * LENGTH, 4)] * 2


@contextmanager
def dealing() -> Iterator[list[int]]:
    """Yields a list that gets, for each call that distributes images, the rows of this rank's images."""
    of_all, found = seqtile.sp.images._of_all, []

    def recorded(output: Any, images: Any) -> Any:
        found.append(sum(images.own_sizes))
        return of_all(output, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seqtile.sp.images, "_of_all", recorded)
        yield found


def assert_same_in_float64(loss: Tensor, model: nn.Module, expected: Step, what: str) -> None:
    assert relative_error(loss.detach(), expected[0]) <= 1e-6, what
    for name, gradient in averaged(model).items():
        if expected[1][name] is not None and expected[1][name].norm() > 1e-12:
            error = relative_error(gradient, expected[1][name])
            assert error <= 1e-6, f"{name}, {what}, is {error:.1e} off"


def dealt(model_type: str) -> None:
    """Six images: each rank encodes some of them, with one more all-gather, and one more all-reduce in the backward;
    loss and gradients in float64."""
    ctx, (one, batch) = context(), made(model_type, 2)
    one.double().set_experts_implementation("eager")  # its rotary embeddings and norms stay in float32
    batch = {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}
    expected = by_first_rank(loss_and_gradients, one, **batch)
    sp.apply_ulysses(many := copy.deepcopy(one), ctx, batches="whole")
    counts, [tower] = [], [each for name, each in many.named_modules() if name.endswith((".visual", ".vision_tower"))]
    for how in ("dealt", "whole"):
        many.zero_grad()
        with counted() as forward, dealing() as encoded:
            loss = many(**batch).loss
        assert len(encoded) == (model_type in DEALT and how == "dealt")
        if model_type not in DEALT:
            assert relative_error(loss.detach(), expected[0]) <= 1e-6
            return
        with counted() as backward:
            loss.backward()
        counts.append((forward, backward))
        assert_same_in_float64(loss, many, expected, how)
        if how == "dealt":
            [own] = encoded
            if ctx.rank == 0:  # of one rank, as a logger's
                tower.register_forward_hook(lambda *_: None)
    (forward, backward), (forward_whole, backward_whole) = counts
    most = {2: (80, 3), 4: (48, 2)}[ctx.size]["grid" not in " ".join(batch)]  # patches, or images, of the first rank
    layers = 1 + len(getattr(many.config.vision_config, "deepstack_visual_indexes", ()))
    width, tokens = layers * 48 * 8, int((batch["input_ids"] == IMAGE).sum())
    more = NONE_MORE | {"all_gather": 1, "gathered bytes": tokens * most // len(batch["pixel_values"]) * width}
    assert {name: forward[name] - forward_whole[name] for name in forward} == more
    more = NONE_MORE | {"all_reduce": 1, "reduced bytes": tokens * width}
    assert {name: backward[name] - backward_whole[name] for name in backward} == more
    assert own == most or ctx.rank, f"{own} of {most}"


def reads_hidden(model: nn.Module) -> None:
    """Makes a model also use rarely read features."""
    encode = model.model.get_image_features

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = encode(*args, **kwargs)
        common = output.last_hidden_state.square().cumsum(0).mean()
        output.pooler_output = [each * common for each in output.pooler_output]
        return output

    model.model.get_image_features = changed


def seldom_read() -> None:
    """A model that reads the tower's last hidden states gets those of all images, with gradients."""
    ctx, (one, batch) = context(), made("qwen2_5_vl", 2)
    batch["pixel_values"] = batch["pixel_values"].double()
    sp.apply_ulysses(many := copy.deepcopy(one.double()), ctx, batches="whole")
    reads_hidden(one)
    reads_hidden(many)
    expected = by_first_rank(loss_and_gradients, one, **batch)
    with dealing() as dealt:
        loss = many(**batch).loss
    loss.backward()
    assert_same_in_float64(loss, many, expected, "seldom read")
    assert dealt


def each_with_all(module: nn.Module, args: tuple, output: Any) -> None:
    """A tower whose images depend on each other."""
    output.pooler_output = output.pooler_output + 0.01 * output.pooler_output.mean()


def with_noise(module: nn.Module, args: tuple, output: Any) -> None:
    output.pooler_output = nn.functional.dropout(output.pooler_output, 0.1)


class Other(nn.Identity):
    """A module of a user's."""


def with_hook(model: nn.Module, hook: Callable) -> None:
    model.model.visual.register_forward_hook(hook)


def with_dropout(model: nn.Module) -> None:
    model.model.visual.blocks[1].attn.attention_dropout = 0.1


def with_module(model: nn.Module) -> None:
    model.model.visual.blocks[1].mlp.other = Other()


def not_dealt() -> None:
    """Towers whose images depend on each other, that draw random numbers or hold what is not known; fewer images than
    ranks. Batches that differ are refused before data is sent by their sizes."""
    ctx, (one, batch) = context(), made("qwen2_5_vl")
    for change in (
        partial(with_hook, hook=each_with_all),
        partial(with_hook, hook=with_noise),
        with_dropout,
        with_module,
    ):
        change(many := copy.deepcopy(one))
        torch.manual_seed(0)
        expected = many(**batch).loss
        sp.apply_ulysses(many, ctx, batches="whole")
        torch.manual_seed(0)
        with dealing() as dealt:
            assert relative_error(many(**batch).loss, expected) <= 1e-5, change
        assert not dealt, change
    sp.apply_ulysses(one, ctx, batches="whole")
    row = {name: batch[name][1:2] for name in ("input_ids", "labels", "mm_token_type_ids")}
    row |= {"pixel_values": batch["pixel_values"][-16:], "image_grid_thw": batch["image_grid_thw"][-1:]}
    with dealing() as dealt:
        assert one(**row).loss.isfinite() and not dealt, "one image"
        with pytest.raises(ValueError, match="expected the same whole batch on every rank of a group"):
            one(**row | {"pixel_values": row["pixel_values"] + ctx.rank})
        loss = one(**batch).loss
        assert len(dealt) == 1
    for other in (row, {name: batch[name][2:] for name in ("input_ids", "labels", "mm_token_type_ids")}):
        with pytest.raises(ValueError, match="expected the same whole batch on every rank of a group"):
            one(**(other if ctx.rank else batch))
    assert relative_error(one(**batch).loss, loss) <= 1e-6, "after a failure"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seqtile.sp.images, "_share", lambda leaf, sizes: None)
        with pytest.raises(ValueError, match=r"no tensor with equally many rows .* leave this model whole"):
            one(**batch)
    sp.restore(one)
    assert "get_image_features" not in vars(one.model)
    assert one.model.language_model.config._attn_implementation == "sdpa"


def without_images(one: nn.Module, many: nn.Module) -> None:
    """Text alone, and generated words."""
    ids = torch.randint(10, WORDS, (2, LENGTH))
    with torch.no_grad():
        inputs = {"input_ids": ids, "labels": ids}
        if "gemma3" in one.config.model_type or "paligemma" in one.config.model_type:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        assert torch.allclose(many(**inputs).loss, one(**inputs).loss, rtol=1e-5)
        words = [model.eval().generate(ids[:1, :9], max_new_tokens=2, do_sample=False) for model in (one, many)]
    assert words[0].equal(words[1])


def batch_of_group(model_type: str, group: int) -> Inputs:
    torch.manual_seed(group)
    return made(model_type)[1]


def by_one_process(model: nn.Module, model_type: str, groups: int) -> tuple[float, dict[str, Tensor]]:
    """A step over the mean of the groups' losses. Returns that loss and the trained weights."""
    losses = [model(**batch_of_group(model_type, group)).loss / groups for group in range(groups)]
    sum(losses).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.optim.SGD(trained.values(), lr=1.0).step()
    return float(sum(losses)), {name: parameter.detach() for name, parameter in trained.items()}


def reduced(model_type: str, strategy: str, frozen: bool) -> None:
    """A step of two groups of two ranks, each with its own images: every weight changes as in one process, inside and
    outside the text model."""
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
    with dealing() as dealt:
        ours = wrapped(**batch_of_group(model_type, ctx.data_parallel_rank)).loss
    assert dealt
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

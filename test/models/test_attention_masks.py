"""Hugging Face's masks of length x length are announced before they are made, with the reason, and only if made."""

from collections.abc import Callable

import pytest
import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

import seqtile
from seqtile.attention.backends import check_has_masks
from seqtile.models.forward import attention_masks
from seqtile.models.forward.attention_masks import WatchedMask, watch_masks
from support.tiny import build

pytestmark = pytest.mark.usefixtures("pristine")
ROWS, LENGTH = 2, 64
PADDED = torch.ones(ROWS, LENGTH, dtype=torch.long).tril(40)
PACKED = (torch.arange(LENGTH) % 40).expand(ROWS, -1)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of masks above 100 bytes, by functions that have said nothing yet."""
    found: list[str] = []
    for name in ("sdpa", "eager"):
        function = getattr(ALL_MASK_ATTENTION_FUNCTIONS[name], "function", ALL_MASK_ATTENTION_FUNCTIONS[name])
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, function)
    monkeypatch.setattr(attention_masks, "LARGE", 100)
    monkeypatch.setattr(attention_masks.logger, "warning", found.append)
    return found


@pytest.mark.parametrize(
    ("arch", "attention", "given", "why", "mebibytes"),
    [
        ("llama", "sdpa", {}, None, 0),
        ("llama", "sdpa", {"attention_mask": torch.ones(ROWS, LENGTH)}, None, 0),
        ("llama", "sdpa", {"attention_mask": PADDED}, "rows are padded", ROWS),
        ("llama", "sdpa", {"position_ids": PACKED, "use_cache": False}, "documents are packed in a row", ROWS),
        ("mistral", "sdpa", {}, "its attention has a window", 1),
        ("llama", "eager", {}, "its attention is eager", 4 * ROWS),
    ],
)
def test_a_large_mask(said: list[str], arch: str, attention: str, given: dict, why: str | None, mebibytes: int) -> None:
    """In training and in evaluation, once."""
    model, tokens = build(arch, attn_implementation=attention), torch.ones(ROWS, LENGTH, dtype=torch.long)
    expected = model(tokens, **given).logits
    watch_masks()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens, **given).logits, expected)
    assert len(said) == (why is not None)
    model.train()(tokens, **given)
    if why is not None:
        [text] = said
        gib = mebibytes * LENGTH**2 / 2**30
        assert text.startswith(f"Hugging Face makes attention masks of 64 x 64, {gib:.2g} GiB, because {why}")
        assert 'attention="varlen"' in text


def test_a_mask_is_announced_before_it_is_made(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory that runs out does not hide the reason; together with what a release computes wrongly."""
    monkeypatch.setattr(attention_masks, "mask_limit", lambda attention, *size: f"{attention} misreads {size}")

    def no_memory(*indices: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    def make(mask_function: Callable, **given: object) -> torch.Tensor:
        return mask_function()

    sizes = {"batch_size": 1, "q_length": 64, "kv_length": 80, "device": "cuda:0"}
    with pytest.raises(torch.OutOfMemoryError):
        WatchedMask("sdpa", make)(**sizes, mask_function=no_memory)
    assert "keys are cached" in said[0] and "sdpa misreads (64, 80)" in said[0]


def test_the_functions_are_replaced_once_and_found_by_sequence_parallelism(said: list[str]) -> None:
    """However little is tiled."""
    for _ in range(2):
        seqtile.apply_seqtile(build("llama"), mlp=False, check=False)
    watched = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert isinstance(watched, WatchedMask) and watched.function is sdpa_mask
    for implementation in ("sdpa", "eager"):
        check_has_masks(implementation)

"""The table of what attention kernels compute wrongly in some releases, and who asks it. No kernel runs: queries and
masks are on the device "meta", which stands for a GPU."""

from collections.abc import Callable

import pytest
import torch

import seqtile
from seqtile import fitting, limits, memory
from seqtile.attention import backends
from seqtile.limits import flash_limit, mask_limit
from seqtile.models import status as model_status
from seqtile.models.forward import attention_masks
from seqtile.ops import attention_limits
from seqtile.ops.attention_limits import attention_warning
from seqtile.recipes import plan
from seqtile.sp import attention as sp_attention
from seqtile.sp.attention import UlyssesAttention
from seqtile.sp.groups import ALONE
from seqtile.sp.layout import ShardedLayout
from support.tiny import build

TOO_MANY = 2**31 // (32 * 128)  # tokens of 32 heads of 128


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], None]:
    """Sets which release of a package is installed."""
    found: dict[str, str | None] = {}
    monkeypatch.setattr(limits, "installed", lambda package: found.get(package))
    monkeypatch.setattr(limits, "limit_of", limits.limit_of.__wrapped__)  # which keeps its answers
    return found.__setitem__


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What tiled layers and sequence parallelism warn of."""
    found: list[str] = []
    for room in (attention_masks, backends):
        monkeypatch.setattr(room.logger, "warning_once", found.append)
    return found


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained and dtype.is_floating_point)


@pytest.mark.parametrize(
    ("package", "name", "attention", "broken"),
    [
        ("torch", "2.9.0", "sdpa", True),
        ("torch", "2.10.0+cu128", "sdpa", True),
        ("torch", "2.11.0+cu130", "sdpa", False),
        ("torch", "2.10.0", "seqtile_torch_varlen", True),
        ("torch", "2.10.0", "flash_attention_2", False),
        ("torch", "2.10.0", "eager", False),
        ("flash-attn", "2.7.4.post1", "flash_attention_2", True),
        ("flash-attn", "2.8.3", "flash_attention_2", False),
        ("flash-attn", None, "flash_attention_2", False),
    ],
)
def test_the_backward_of_flash(release: Callable, package: str, name: str | None, attention: str, broken: bool) -> None:
    release(package, name)
    found = flash_limit(attention, 32, 128)
    assert (found is not None) == broken
    if broken:
        assert found[0] == TOO_MANY and f"{package} {name} overflows" in found[1]
        assert flash_limit(attention, 32, 100)[0] == TOO_MANY and flash_limit(attention, 4, 64)[0] == 16 * TOO_MANY
        assert flash_limit(attention, 3, 80)[0] == 2**31 // (3 * 96) + 1


@pytest.mark.parametrize(("name", "broken"), [("2.9.1", True), ("2.12.1+cu130", True), ("2.13.0+cpu", False)])
def test_masks_of_the_efficient_attention(release: Callable, name: str, broken: bool) -> None:
    release("torch", name)
    assert mask_limit("sdpa", 2**16, 2**16) is None and mask_limit("eager", 2**16, 2**17) is None
    assert (mask_limit("sdpa", 2**16, 2**16 + 8) is not None) == broken


def test_calls_of_attention(release: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only gradients in half precision are FlashAttention's, and only without a mask; masks are refused where the
    efficient attention reads them, else warned of."""
    release("torch", "2.10.0")
    q, mask = on_meta(1, 32, TOO_MANY, 128), on_meta(1, 1, 2**17, 2**17, dtype=torch.bool)
    assert "head_groups" in attention_warning("sdpa", q, None)
    assert attention_warning("sdpa", q, None, length=TOO_MANY - 1) is None
    others = [q[:, :, 1:], q[:, :4], q.detach(), on_meta(*q.shape, dtype=torch.float32), torch.empty(1, 1, 1, 1)]
    assert [attention_warning("sdpa", other, None) for other in others] == [None] * len(others)
    assert attention_warning("sdpa", q, mask[..., :8]) is None and attention_warning("eager", q, mask) is None
    with pytest.raises(ValueError, match=r"a mask of 131,072 x 131,072 has more than 2\*\*32 elements"):
        attention_warning("sdpa", q, mask)
    monkeypatch.setattr(attention_limits, "_takes_efficient", lambda q, mask: False)
    assert "another kernel, untested" in attention_warning("sdpa", q, mask)


@pytest.mark.usefixtures("pristine")
@pytest.mark.parametrize("arch", ["llama", "cohere"])
def test_tiled_layers_ask(arch: str, release: Callable, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused layer, and one that runs in chunks around its attention; with limits that a short sequence reaches."""
    release("torch", "2.10.0")
    monkeypatch.setattr(limits, "INT32", 300 * 4 * 32)
    monkeypatch.setattr(limits, "UINT32", 300 * 299)
    model = build(arch, attn_implementation="sdpa").to(torch.bfloat16)
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=100, check=False)
    layer = model.to("meta").model.layers[0]

    def step(length: int, mask: torch.Tensor | None) -> None:
        angles = (on_meta(1, length, 12, trained=False),) * 2
        layer(on_meta(1, length, 48), position_embeddings=angles, attention_mask=mask)

    step(299, None)
    assert not said
    step(300, None)
    assert len(said) == 1 and "from 300 tokens" in said[0]
    with pytest.raises(ValueError, match=r"more than 2\*\*32 elements"):
        step(300, on_meta(1, 1, 300, 300, dtype=torch.bool))


def test_sequence_parallelism_asks(release: Callable, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are computed one by one, so only a long one counts."""
    release("torch", "2.10.0")
    monkeypatch.setattr(sp_attention, "attend", lambda *given: None)
    q, one = on_meta(1, 32, 2 * TOO_MANY, 128), ALONE
    for end in (TOO_MANY - 1, TOO_MANY):
        layout = ShardedLayout(one, 2 * TOO_MANY, (((0, end), (end, end + 9)),), "sdpa")
        UlyssesAttention(None, layout, None, {}, 32, 8).attend(q, q, q)
    assert len(said) == 1 and f"from {TOO_MANY:,} tokens" in said[0]


def test_plans_and_fit_ask(release: Callable) -> None:
    release("flash-attn", "2.7.4")
    long = {"model": "meta-llama/Llama-3.1-8B", "only": "loss,MLP", "layer": True, "seq_len": TOO_MANY}
    [note] = [note for note in plan.forecast(plan.PlanOptions(**long)).notes if "overflows" in note]
    assert note.startswith(f"flash_attention_2: from {TOO_MANY:,} tokens")
    for fewer in ({"head_groups": "auto"}, {"seq_len": TOO_MANY - 1}, {"gpus": 8}):
        assert "overflows" not in str(plan.forecast(plan.PlanOptions(**long | fewer)).notes)
    step = memory.plan("meta-llama/Llama-3.1-8B", seq_len=TOO_MANY, sequence_parallel=4, gpus=4, tiles=memory.TILES)
    assert step.heads_at_once == 8
    alone = memory.plan("meta-llama/Llama-3.1-8B", seq_len=TOO_MANY)
    assert "overflows" in str(fitting._notes(alone, "flash_attention_2"))
    assert fitting._notes(alone, "sdpa") == []


def test_status_asks(release: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", attn_implementation="sdpa").to(torch.bfloat16)

    def notes() -> str:
        return " ".join(note for note in seqtile.status(model).notes if note.startswith("sdpa"))

    release("torch", "2.10.0")
    assert not notes()
    monkeypatch.setattr(model_status, "_is_on_gpu", lambda model: True)
    assert "overflows" in notes()
    release("torch", "2.11.0")
    assert not notes()

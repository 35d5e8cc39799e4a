"""A rank's part of a batch."""

import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import DataCollatorWithFlattening

from seqtile import apply_seqtile, sp
from seqtile.attention.nodes import Nodes
from seqtile.sp import cut, shards
from seqtile.sp.shards import per_node_in
from support.tiny import batch_of, build


def cut_over(batch: dict, size: int) -> list[dict]:
    return [
        sp.shard(dict(batch), SimpleNamespace(rank=rank, size=size, nodes=Nodes(size, size))) for rank in range(size)
    ]


def test_labels_are_shifted_before_the_cut() -> None:
    """The example of Arctic Long Sequence Training, 4.3."""
    ids = torch.arange(1, 9)[None]
    first, second = cut_over({"input_ids": ids, "labels": ids}, 2)
    assert first["shift_labels"].tolist() == [[2, 3, 4, 5]] and second["shift_labels"].tolist() == [[6, 7, 8, -100]]
    assert first["labels"].tolist() == [[1, 2, 3, 4]] and second["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 7


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_once(size: int) -> None:
    """Tensors with a sequence dimension are padded and cut, whatever their other dimensions; all others are kept
    whole."""
    ids, labels, kinds = (torch.randint(0, 9, (2, 10)) for _ in range(3))
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), "token_type_ids": kinds}
    batch["position_ids"] = torch.randint(0, 9, (3, 2, 10))  # multimodal rotary embeddings
    batch |= {"inputs_weights": torch.randn(2, 10, 5), "pixel_values": torch.randn(7, 3, 4), "names": ["a", "b"]}
    parts, missing = cut_over(batch, size), -10 % size
    for name, value in batch.items():
        if name in ("pixel_values", "names"):
            assert all(part[name] is value for part in parts)
            continue
        axis = 2 if name == "position_ids" else 1
        kept, padding = torch.cat([part[name] for part in parts], axis).split([10, missing], axis)
        fill = torch.arange(missing) if axis == 2 else torch.tensor(-100 if name == "labels" else 0)
        assert kept.equal(value) and padding.equal(fill.to(padding.dtype).expand_as(padding))


def test_a_batch_is_padded_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, padded, function = batch_of(2, 10), [], shards._padded
    expected = cut_over(batch, 3)
    monkeypatch.setattr(shards, "_padded", lambda name, *rest: (padded.append(name), function(name, *rest))[1])
    found = cut.parts_of(batch, range(3), Nodes(3, 3))
    assert sorted(padded) == ["attention_mask", "input_ids", "labels", "position_ids", "shift_labels"]
    for part, other in zip(found, expected, strict=True):
        assert part.keys() == other.keys()
        assert all(torch.as_tensor(value).equal(torch.as_tensor(other[name])) for name, value in part.items())
        assert all(x.untyped_storage().nbytes() == x.nbytes for name, x in part.items() if name in padded)


def test_packed_by_hugging_faces_collator() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    ctx = SimpleNamespace(rank=1, size=2, nodes=Nodes(2, 2))
    batch = sp.DataShardingCollator(DataCollatorWithFlattening(), ctx)(rows)
    assert batch["position_ids"].tolist() == [[0, 1, 0]], "the last of two documents, and a token of padding"
    assert batch["shift_labels"].tolist() == [[9, -100, -100]]
    assert batch["num_items_in_batch"] == 3, "no document's first token is a label of the one before"


def test_a_batch_has_its_hash() -> None:
    """The same in every shard, for any number of ranks, saved and loaded; different if an integer or its place
    differs."""
    ids = torch.randperm(1000)[:40].view(2, 20)
    batch = {"input_ids": ids, "labels": ids.clone(), "weights": torch.randn(2, 20)}
    batch["position_ids"] = torch.arange(20)[None]
    parts = [part for size in (1, 2, 3) for part in cut_over(batch, size)]
    hashes = [int(part["batch_hash"]) for part in parts]
    assert len({each >> 16 for each in hashes}) == 1 and [*map(per_node_in, hashes)] == [1, 2, 2, 3, 3, 3]
    found = {hashes[1]}
    assert {int(part["batch_hash"]) for part in cut_over(batch | {"weights": ids / 3}, 2)} == found
    file = io.BytesIO()
    torch.save(parts[0], file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["batch_hash"].equal(parts[0]["batch_hash"])
    for name in ("input_ids", "labels", "position_ids"):
        row = batch[name].flatten()
        for other in (row.flip(0), row + 1, row.index_fill(0, torch.tensor(7), -100), row[torch.randperm(len(row))]):
            found.add(int(cut_over(batch | {name: other.view_as(batch[name])}, 2)[0]["batch_hash"]))
    assert len(found) == 1 + 3 * 4


@pytest.mark.parametrize("tiled", [False, True], ids=["untiled", "tiled"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_that_is_not_spread_takes_the_batch_too(implementation: str, tiled: bool) -> None:
    model = build("llama", num_key_value_heads=4, attn_implementation=implementation)
    batch = batch_of(1, 40)
    del batch["attention_mask"]
    shard = cut_over(batch, 1)[0]
    expected = model(**{name: value for name, value in shard.items() if name != "batch_hash"}).loss
    if tiled:
        apply_seqtile(model, chunk_tokens=15, layer=True, head_groups=2)
    torch.testing.assert_close(model(**shard).loss, expected)


def test_a_batch_without_tokens() -> None:
    with pytest.raises(ValueError, match="the batch has labels, expected input_ids or inputs_embeds in it"):
        cut_over({"labels": torch.ones(1, 4)}, 2)


def test_a_collator_goes_to_workers() -> None:
    """A process group cannot be pickled, but a loader's spawned workers need the collator."""
    ctx = sp.SequenceParallel(lambda: None, 1, 2, 0, 1)
    collator = pickle.loads(pickle.dumps(sp.DataShardingCollator(DataCollatorWithFlattening(), ctx)))
    assert collator([{"input_ids": [5, 6, 7, 8]}])["input_ids"].tolist() == [[7, 8]]

"""Mutants of sequence parallelism. What several processes alone show is kept few: their tests are slow."""

from functools import partial

from mutants_list.mutant import Mutant

COLLATOR = ("sp/test_collator.py",)
DOCUMENTS = ("sp/test_documents.py",)
HEADS = ("sp/test_heads.py",)
EXCHANGES = ("sp/test_all_to_all.py",)
SDPA = ("sp/test_sdpa.py",)
LAYOUT = ("sp/test_layout.py",)
OWNERS = ("sp/test_owners.py",)
OverRanks = partial(Mutant, tests=("sp/test_sequence_parallel.py",), dist=True)

MUTANTS = (
    Mutant(
        "blocks: a window is one token wider",
        "Block.mask",
        "(distance >= 0) & (distance < reach)",
        "(distance >= 0) & (distance <= reach)",
        DOCUMENTS,
    ),
    Mutant(
        "blocks: a causal square forgets its window",
        "Block.is_causal",
        "not self.two_ways and count(self.keys) <= reach",
        "not self.two_ways",
        DOCUMENTS,
    ),
    Mutant(
        "blocks: masks grow with the square of the length",
        "blocks",
        "end = min(q1, q0 + size)",
        "end = q1",
        DOCUMENTS,
    ),
    Mutant(
        "sdpa: cuDNN computes blocks with a mask",
        "by_masks.with_mask",
        "without_cudnn() if by_cudnn else nullcontext()",
        "nullcontext()",
        SDPA,
    ),
    Mutant(
        "sdpa: a backend that was switched off is switched on",
        "others_enabled",
        "if is_enabled()]",
        "]",
        SDPA,
    ),
    Mutant(
        "sdpa: documents of many lengths are rounded up, for cuDNN",
        "lengths_for_cudnn",
        "<= FEW_LENGTHS else None",
        "<= 10 * FEW_LENGTHS else None",
        SDPA,
    ),
    Mutant(
        "a batch's hash: blocks may change places",
        "_hash",
        "mixed(part, i * _HASHED)",
        "mixed(part)",
        LAYOUT,
        select="hashed",
    ),
    Mutant(
        "documents: positions that leave some out do not part them",
        "edges_of",
        "follows = (positions[:, 1:] == positions[:, :-1] + 1)",
        "follows = (positions[:, 1:] > positions[:, :-1])",
        DOCUMENTS,
    ),
    Mutant(
        "documents: a mask with a hole is not refused",
        "documents_at",
        "if has_mask and any(len(row) > 1 for row in rows):",
        "if has_mask and any(len(row) > 9 for row in rows):",
        DOCUMENTS,
    ),
    Mutant(
        "flash attention's form: keys of the documents before",
        "_packed_calls",
        "(row * length + start, row * length + stop)",
        "(row * length, row * length + stop)",
        DOCUMENTS,
    ),
    Mutant(
        "flex attention's form: a block is full if one of its queries sees all",
        "block_mask",
        "(own.amax(3) < end.amin(3)) & (away",
        "(own.amin(3) < end.amin(3)) & (away",
        DOCUMENTS,
    ),
    Mutant(
        "collator: the label after the last token is no ignored one",
        "parts_of",
        'F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]',
        'F.pad(batch["labels"], (0, 1), value=0)[..., 1:]',
        COLLATOR,
    ),
    Mutant(
        "collator: positions of a shard begin at 0",
        "parts_of",
        "torch.arange(length, device=tokens.device).expand(rows, -1)",
        "(torch.arange(length, device=tokens.device) % 4).expand(rows, -1)",
        COLLATOR,
    ),
    Mutant(
        "same batch: the hash knows no order",
        "mixed",
        "values.to(torch.int64) + order.mul_(_FACTORS[0])",
        "values.to(torch.int64) + _FACTORS[0]",
        COLLATOR,
    ),
    Mutant(
        "heads: ranks that share a head have unequal work",
        "rank_heads",
        "low, high = (ends[part], ends[part + 1]), (ends[-part - 2], ends[-part - 1])",
        "low, high = (ends[2 * part], ends[2 * part + 1]), (ends[2 * part + 1], ends[2 * part + 2])",
        HEADS,
    ),
    Mutant(
        "heads: kv heads that are read unequally are computed together",
        "RankHeads.groups",
        "if len(set(read)) == 1:",
        "if len(set(read)) > 0:",
        DOCUMENTS,
    ),
    Mutant(
        "exchange: of the gradients of a shared kv head one rank's stays",
        "AllToAll._unpacked",
        "torch.sum(place, 1, keepdim=True, out=part)",
        "part.copy_(place[:, :1])",
        EXCHANGES,
    ),
    Mutant(
        "exchange: a rank at a time in a narrow dtype",
        "AllToAll._unpacked",
        "arrived.new_zeros(shape, dtype=wide) if i in added",
        "arrived.new_zeros(shape) if i in added",
        EXCHANGES,
    ),
    Mutant(
        "exchange: one copy a rank where every rank has as many heads",
        "AllToAll.__init__",
        "self._is_even = q_heads % size == 0 and",
        "self._is_even = size == 1 and",
        EXCHANGES,
    ),
    Mutant(
        "exchange: of two pieces of a rank's queries both are put first",
        "AllToAll.__init__.pieces",
        "at = count(within(rows, 0, first)) if by_heads else first - start",
        "at = count(within(rows, start, first)) if by_heads else first - start",
        EXCHANGES,
    ),
    Mutant(
        "documents: each row is waited for",
        "rows_between",
        "for row in edges.cpu()]",
        "for row in edges]",
        LAYOUT,
    ),
    Mutant(
        "layout: what a layer asks for is found for each",
        "Layout.once",
        "if key not in self._made:",
        "if True:",
        LAYOUT,
    ),
    Mutant(
        "owners: tokens in any order are one run",
        "_index",
        "index.equal(torch.arange(run.start, run.stop))",
        "len(index) == run.stop - run.start",
        OWNERS,
    ),
    Mutant(
        "forward: a forward of another batch leaves what it knows",
        "ShardingHooks.other_batch",
        "self.run(running)",
        "self.run(self.forward)",
        LAYOUT,
        select="another_batch",
    ),
    Mutant(
        "same batch: documents are waited for besides",
        "check_same_batch",
        "numbers, *along = _on_host(gather(mine, sp_group), *along)",
        "numbers, *along = (each.cpu() for each in (gather(mine, sp_group), *along))",
        LAYOUT,
        select="waited_for_once",
    ),
    OverRanks(
        "loss: its gradient is not multiplied by the size of the group",
        "reduce_loss",
        "reduced = loss * ctx.size",
        "reduced = loss * 1",
        select="losses",
    ),
    OverRanks(
        "loss: a partial loss's backward is not refused",
        "PartialLossFunction.backward",
        "if not node.is_reduced:",
        "if node.is_reduced is None:",
        select="losses",
    ),
    OverRanks(
        "same batch: shards of different batches are not refused",
        "check_same_batch",
        "elif batch_hash is not None and len(set(hashes)) > 1:",
        "elif batch_hash is not None and len(hashes) > 9:",
        select="batches",
    ),
    OverRanks(
        "same batch: a forward that failed leaves its positions to the next",
        "ShardingHooks.forget",
        '{"layout": None, ',
        "{",
        select="after_a_failure",
    ),
    OverRanks(
        "exchange: a dtype that cannot come back is refused in the backward alone",
        "AllToAll.start",
        "_wire_dtype(dtypes, self._summed)",
        "_wire_dtype(dtypes, [] if to_heads else self._summed)",
        select="refusals",
    ),
    OverRanks(
        "loader: a run that goes on draws another order",
        "ShardedDataLoader._batches",
        '            torch.set_rng_state(self._start["torch"])\n',
        "",
        select="loader",
    ),
    OverRanks(
        "attention: a mask of a layer's own is dropped",
        "UlyssesFunction._steps",
        "        if attention_mask is not None:\n",
        "        if attention_mask is not None and attention_mask.dim() < 4:\n",
        select="refusals",
    ),
)

"""Mutants of whole batches over ranks, and of trainers that are given them."""

from functools import partial

from mutants_list.mutant import Mutant

OverRanks = partial(Mutant, tests=("sp/test_whole_batches.py",), dist=True)

MUTANTS = (
    OverRanks(
        "whole: the gradient of what is gathered is a rank's alone",
        "_Gathered.backward",
        "node.owners.own(gradient) * node.owners.sp_group.size",
        "node.owners.own(gradient)",
        select="own",
    ),
    OverRanks(
        "whole: the gradient of a sum over ranks is a rank's alone",
        "_Summed.backward",
        "gradient * node.size",
        "gradient",
        select="own",
    ),
    OverRanks(
        "whole: a gradient of the whole is taken for a rank's",
        "_rows_of_gradient",
        "owners.summed(own * owners.sp_group.size, len(like.rows))",
        "owners.summed(own, len(like.rows))",
        select="own",
    ),
    OverRanks(
        "whole: the weight of a projection is cut like tokens",
        "_by_token",
        "operands = args[:1] if function in _WITH_WEIGHTS else args",
        "operands = args",
        select="own or classification",
    ),
    OverRanks(
        "whole: what was computed of all tokens is an operand of a rank's own",
        "depends_on_all_ranks",
        "getattr(function(node), OF_ALL_RANKS, False)",
        "False",
        select="own",
    ),
    OverRanks(
        "whole: a rank without tokens counts a label",
        "_never_empty",
        "labels.new_full((1, *labels.shape[1:]), ignored)",
        "labels.new_full((1, *labels.shape[1:]), 1)",
        select="short",
    ),
    OverRanks(
        "whole: a mean divides by a rank's labels",
        "_cross_entropy",
        '_divisor(target, counted, options.get("class_weight"))',
        '_divisor(target, counted, options.get("class_weight")) / 2',
        select="own",
    ),
    OverRanks(
        "whole: a forward with a cache is cut",
        "WholeBatches.begin",
        "if cache_in(kwargs) is not None:",
        'if kwargs.get("past_key_values") == 7:',
        select="images",
    ),
    OverRanks(
        "whole: batches of other images are not refused",
        "WholeBatches._layout",
        "if forward.batch_hash is None else forward.batch_hash",
        "if True else forward.batch_hash",
        select="not_dealt",
    ),
    Mutant(
        "whole: positions that a model keeps to itself are lost",
        "WholeBatches._by_name",
        'kwargs["position_ids"] = self.sharding.forward.position_ids',
        'kwargs["position_ids"] = None',
        ("sp/test_whole_batches.py::test_families[mamba2-packed-2]",),
        dist=True,
    ),
    OverRanks(
        "whole: a rank adds features of all images",
        "_own_features",
        "[masked.own(each) for each in value] if",
        "list(value) if",
        select="images and qwen3_vl",
    ),
    OverRanks(
        "images: a tower that mixes images is dealt",
        "_is_unknown",
        'any(home.split(".")[0] not in _LIBRARIES for home in homes)',
        "False",
        select="not_dealt",
    ),
    OverRanks(
        "images: the gradient of dealt features is of a rank's tokens",
        "_of_all",
        "with_whole_gradient(gathered(rows, images.owners(share)), images.sp_group)",
        "gathered(rows, images.owners(share))",
        select="images_are_dealt",
    ),
    OverRanks(
        "images: features of different batches are gathered",
        "DealtImages.__call__",
        "self.batches.compare_batch()",
        "pass",
        select="not_dealt",
    ),
    OverRanks(
        "spans: tokens of an image see each other one way",
        "Block.mask",
        "(distance < reach) if self.two_ways else",
        "(distance < reach) & (distance >= 0) if self.two_ways else",
        select="images",
    ),
    OverRanks(
        "spans: layers with a window have those of layers without",
        "LocalAttention.spans",
        "self.layout.spans[self.window is not None]",
        "self.layout.spans[0]",
        select="images and gemma4",
    ),
    OverRanks(
        "trainer: what is gathered comes from every rank",
        "_Groups.once_a_group",
        "x.unflatten(0, (ranks, -1))[self.first_ranks].flatten(0, 1)",
        "x",
        select="trl and grpo",
    ),
    OverRanks(
        "trainer: generations are counted over ranks",
        "SequenceParallelTrainerMixin.get_train_dataloader",
        '"generation_batch_size", of_ranks // size',
        '"generation_batch_size", of_ranks',
        select="trl and grpo",
    ),
    OverRanks(
        "trainer: each rank goes on with its own completions",
        "SequenceParallelTrainerMixin._generate",
        "return found[0]",
        "return super()._generate(*args, **kwargs)",
        select="trl and grpo",
    ),
    Mutant(
        "trainer: one that sees some of the ranks trains",
        "_Groups.take",
        "if seen != ranks:",
        "if seen > ranks:",
        ("sp/test_whole_batches.py",),
        select="unseen",
        dist=True,
    ),
)

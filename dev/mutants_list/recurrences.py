"""Wrong changes to what is spread over ranks besides attention, and to weights that are read by decoding them."""

from functools import partial

from mutants_list.mutant import Mutant

_CASES = "families or sinks or balance or kernels or memory_of_a_rank"
Family = partial(Mutant, tests=("sp/test_sequence_parallel.py",), select=_CASES, dist=True)
LATENT = ("sp/test_heads.py",)
QUANTISED = ("models/test_quantised.py",)
PLANS = ("memory/test_plan.py", "memory/test_against_simulation.py")

MUTANTS = (
    Family(
        "recurrence: a group's channels are taken for those of heads",
        "Recurrence._spread",
        "here = {name: own.kv if name in rule.shared else own.q for name in rule.convolved}",
        "here = {name: own.q for name in rule.convolved}",
    ),
    Family(
        "recurrence: a state goes on into the next document",
        "by_documents",
        "spans = segments(layout, ((0, layout.length),), layout.length)\n",
        "spans = [[r[0]._replace(q1=r[-1].q1, k1=r[-1].q1)] for r in segments(layout, ((0, layout.length),), 2**62)]\n",
    ),
    Family(
        "recurrence: what pads is computed as a document",
        "by_documents",
        "spans = spans * (len(arrived[0]) // len(spans)) if in_one_call else spans",
        "spans = [r if len(r) > 3 else [r[0]._replace(q1=layout.length, k0=0, k1=layout.length)] for r in spans]",
    ),
    Family(
        "recurrence: decays of the first heads on every rank",
        "Recurrence._rule.compute",
        "{name: x[own.q][heads] for name, x in vectors.items()}",
        "{name: x[: own.q.stop - own.q.start][heads] for name, x in vectors.items()}",
    ),
    Family(
        "recurrence: all operands by name",
        "Recurrence._rule.compute",
        "out = self.rule(*[values.pop(name) for name in list(signature.parameters)[: len(args)]], **values)",
        "out = self.rule(**values)",
    ),
    Family(
        "recurrence: documents begin one token late",
        "by_documents",
        "torch.tensor([0, *accumulate(sizes)], device=device)",
        "torch.tensor([0, *(end - 1 for end in accumulate(sizes[:-1])), sum(sizes)])",
    ),
    Family(
        "all-to-all: gradients of shared heads are not added",
        "AllToAll._unpacked",
        "part.add_(of_rank)",
        "part.copy_(of_rank)",
    ),
    Family(
        "sinks: those of the first heads on every rank",
        "UlyssesAttention.local",
        "self.window, self.options).of_heads(heads.q)",
        "self.window, self.options).of_heads(slice(0, heads.q.stop - heads.q.start))",
    ),
    Family(
        "latent: the first heads are expanded on every rank",
        "CompressedKeys.expand",
        "rows = slice(heads.start * width, heads.stop * width)",
        "rows = slice(0, (heads.stop - heads.start) * width)",
    ),
    Mutant(
        "latent: compressed where that is more",
        "CompressedKeys.is_chosen",
        "not self.is_bypassed and compressed < by_heads and plain",
        "not self.is_bypassed and plain",
        LATENT,
    ),
    Family(
        "balance: padding counts",
        "Balance._whole",
        "weight = counted.to(router_logits[0].device, torch.float32)",
        "weight = torch.ones_like(counted, dtype=torch.float32)",
    ),
    Family(
        "balance: every rank adds all of it",
        "Balance.over_ranks",
        "part = whole - whole.detach() * (1 - 1 / sp_group.size)",
        "part = whole",
    ),
    Mutant(
        "quantised: rows of int8 without their scale's dtype",
        "_decoded_int8",
        "return weight.qdata.to(weight.dtype).mul_(weight.scale.to(weight.dtype))",
        "return weight.qdata.to(weight.dtype)",
        QUANTISED,
    ),
    Mutant(
        "quantised: what rounds its input is read",
        "decoding_reason",
        "if any(getattr(module.weight, name, None) is not None for name in layout.of_inputs):",
        "if False:",
        QUANTISED,
    ),
    Mutant(
        "plan: 4 bits are counted as 8",
        "_layer_weights",
        "codes = projections // 2 + projections // 64",
        "codes = projections + projections // 64",
        PLANS,
    ),
    Mutant(
        "plan: nothing is decoded",
        "Setup.decoded",
        "return parameters * self.bytes if self.load_in_4bit or self.autocast else 0",
        "return 0",
        PLANS,
    ),
)

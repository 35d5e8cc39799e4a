"""Wrong changes to what is spread over ranks besides attention, and to weights that are read by decoding them."""

from functools import partial

from mutants_list.mutant import Mutant

Family = partial(Mutant, tests=("sp/test_sequence_parallel.py",), select="families and not 1", dist=True)
LATENT = ("sp/test_heads.py",)
QUANTISED = ("models/test_quantised.py",)
PLANS = ("memory/test_plan.py", "memory/test_against_simulation.py")

MUTANTS = (
    Family(
        "recurrence: a group's channels are taken for those of heads",
        "sp/recurrence.py",
        "mine = share.kv if name in rule.shared else share.q\n            found.append(slice(start",
        "mine = share.q\n            found.append(slice(start",
    ),
    Family(
        "recurrence: a state goes on into the next document",
        "sp/recurrence.py",
        "parts = [compute(*(x[:, :, start:stop] for x in chosen)) for start, stop in of_row]",
        "parts = [compute(*(x[:, :, :stop] for x in chosen))[:, start:] for start, stop in of_row]",
    ),
    Family(
        "recurrence: what pads is computed as a document",
        "sp/recurrence.py",
        "    if layout.documents == (((0, layout.length),),):\n        return compute(*arrived)\n    rows = []",
        "    if len(layout.documents) == 1:\n        return compute(*arrived)\n    rows = []",
    ),
    Family(
        "recurrence: decays of the first heads on every rank",
        "sp/recurrence.py",
        "{name: x[share.q][heads] for name, x in vectors.items()}",
        "{name: x[: share.q.stop - share.q.start][heads] for name, x in vectors.items()}",
    ),
    Family(
        "recurrence: all operands by name",
        "sp/recurrence.py",
        "out = self.function(*[values.pop(name) for name in self.positional], **values)",
        "out = self.function(**values)",
    ),
    Family(
        "recurrence: documents begin one token late",
        "sp/recurrence.py",
        "starts = torch.tensor([0, *accumulate(sizes)], device=arrived[0].device)",
        "starts = torch.tensor([0, *(end - 1 for end in accumulate(sizes[:-1])), sum(sizes)])",
    ),
    Family(
        "all-to-all: gradients of shared heads are not added",
        "sp/all_to_all.py",
        "summed = tuple(i for i, shared in enumerate(is_shared) if shared and several)",
        "summed = ()",
    ),
    Family(
        "sinks: those of the first heads on every rank",
        "sp/attention.py",
        "self.window, self.options).of_heads(share.q)",
        "self.window, self.options).of_heads(slice(0, share.q.stop - share.q.start))",
    ),
    Family(
        "latent: the first heads are expanded on every rank",
        "sp/compressed.py",
        "rows = slice(heads.start * width, heads.stop * width)",
        "rows = slice(0, (heads.stop - heads.start) * width)",
    ),
    Mutant(
        "latent: compressed where that is more",
        "sp/compressed.py",
        "self.ctx.size > 1 and compressed < by_heads and plain",
        "self.ctx.size > 1 and plain",
        LATENT,
    ),
    Family(
        "balance: padding counts",
        "sp/balance.py",
        "weight = counted.to(router_logits[0].device, torch.float32)",
        "weight = torch.ones_like(counted, dtype=torch.float32)",
    ),
    Family(
        "balance: every rank adds all of it",
        "sp/balance.py",
        "part = whole - whole.detach() * (1 - 1 / ctx.size)",
        "part = whole",
    ),
    Mutant(
        "quantised: rows of int8 without their scale's dtype",
        "models/quantised.py",
        "return weight.qdata.to(weight.dtype).mul_(weight.scale.to(weight.dtype))",
        "return weight.qdata.to(weight.dtype)",
        QUANTISED,
    ),
    Mutant(
        "quantised: what rounds its input is read",
        "models/quantised.py",
        "if any(getattr(module.weight, name, None) is not None for name in layout.of_inputs):",
        "if False:",
        QUANTISED,
    ),
    Mutant(
        "plan: 4 bits are counted as 8",
        "memory/step.py",
        "codes = projections // 2 + projections // 64",
        "codes = projections + projections // 64",
        PLANS,
    ),
    Mutant(
        "plan: nothing is decoded",
        "memory/setup.py",
        "return parameters * self.bytes if self.load_in_4bit or self.autocast else 0",
        "return 0",
        PLANS,
    ),
)

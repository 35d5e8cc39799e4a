"""Wrong changes to the probes: a defect that would be found no more, or seen where there is none."""

from mutants_list.mutant import Mutant

PROBE = ("probe/test_probe.py",)

MUTANTS = (
    Mutant(
        "probe: changes are looked for before the document as well",
        "changed",
        "differs[beyond:].sum()",
        "differs.sum()",
        PROBE,
    ),
    Mutant(
        "probe: all outputs are counted if one changes",
        "changed",
        "int(differs[beyond:].sum())",
        "int(differs[beyond:].any()) * (TOKENS - beyond)",
        PROBE,
    ),
    Mutant(
        "probe: a gradient in another direction is right",
        "scale",
        "max(abs(factor - 1), left) < CLOSE",
        "abs(factor - 1) < CLOSE",
        PROBE,
    ),
    Mutant(
        "probe: a gradient that is twice too large is right",
        "scale",
        "max(abs(factor - 1), left) < CLOSE",
        "left < CLOSE",
        PROBE,
    ),
    Mutant(
        "probe: the error of the head is compared with itself",
        "head",
        "errors[1] <= 2 * errors[0]",
        "errors[1] <= 2 * errors[1]",
        PROBE,
    ),
    Mutant(
        "probe: memory at one length is taken for its growth",
        "memory",
        "(peaks[1] - peaks[0]) / (LENGTHS[1] - LENGTHS[0])",
        "peaks[1] / LENGTHS[1]",
        PROBE,
    ),
    Mutant(
        "probe: two batches have as many labels each",
        "unequal_batches",
        "labels[:, :-labelled] = -100",
        "labels[:, :-32] = -100",
        PROBE,
    ),
    Mutant(
        "probe: a peer that is not installed is run",
        "Case.absent",
        "return Row(self.probe, self.system, self.package, NOT_INSTALLED)",
        "return None",
        PROBE,
    ),
    Mutant(
        "probe: processes that hang are waited for",
        "ended",
        "time.monotonic() >= end",
        "False",
        PROBE,
    ),
)

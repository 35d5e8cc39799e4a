"""Wrong changes to losses of post-training, to seqtile.fit and to what trainers are given."""

from mutants_list.mutant import Mutant

LOG_PROBS = ("ops/test_linear_log_probs.py",)
DIVERGENCE = ("ops/test_divergences.py",)
TRL = ("integrations/test_trl.py",)

MUTANTS = (
    Mutant(
        "log-probs: factors that differ are taken for one",
        "one_factor",
        "return (first, None) if equal else (None, d_losses)",
        "return first, None",
        LOG_PROBS,
    ),
    Mutant(
        "log-probs: the mean logit counts the padding of a row",
        "cross_entropy_",
        "mean[rows] = x.mean(dim=1)",
        "mean[rows] = x.sum(dim=1) / (vocab + 1)",
        LOG_PROBS,
    ),
    Mutant(
        "divergence: the student's reverse gradient lacks its mean",
        "divergence_",
        "p - q if beta == 0 else of_p * p * (p_term - of_student),",
        "p - q if beta == 0 else of_p * p * p_term,",
        DIVERGENCE,
    ),
    Mutant(
        "divergence: the mixture's weights are swapped",
        "divergence_",
        "((1 - beta) * p + beta * q).clamp_(min=1e-38)",
        "((1 - beta) * q + beta * p).clamp_(min=1e-38)",
        DIVERGENCE,
    ),
    Mutant(
        "heads: the teacher's products get the scale of the student's",
        "_scaled",
        "factor * spec.options[i].logit_scale",
        "factor * spec.options[0].logit_scale",
        DIVERGENCE,
    ),
    Mutant(
        "heads: the only chunk of a second head is multiplied by the hidden states of the first",
        "_scaled",
        "(hidden, parameter, _), rows = chunked.heads[i], chunked.rows",
        "(hidden, parameter, _), rows = chunked.heads[0], chunked.rows",
        DIVERGENCE,
    ),
    Mutant(
        "heads: a sequence of one chunk sums up in float32",
        "ChunkedHeads._no_gradients",
        "one_product = needs[1] and main_grad is None and 0 < self.labelled",
        "one_product = i == 0 and len(self.heads) == 1 and needs[1] and main_grad is None and 0 < self.labelled",
        ("ops/test_head_laws.py",),
        select="one_product",
    ),
    Mutant(
        "top-k: what a cap leaves of the tokens taken out stays in the tail",
        "_divergences",
        "if options.softcap > 0:\n    taken_out",
        "if False:\n    taken_out",
        DIVERGENCE,
    ),
    Mutant(
        "top-k: the tail's gradient forgets the teacher",
        "_divergences",
        "(total * logs.exp() - rest)",
        "(total * logs.exp())",
        DIVERGENCE,
    ),
    Mutant(
        "trl: every trainer's log-probabilities are taken for summed",
        "_announced.announcing",
        'self.args.loss_type == "nll"',
        "True",
        TRL,
        select="products",
    ),
    Mutant(
        "trl: mean logits and hits change places",
        "_Head.apply",
        "squares.log(), mean_logit, is_largest",
        "squares.log(), is_largest, mean_logit",
        TRL,
        select="llama",
    ),
    Mutant(
        "trl: another version is patched",
        "apply_seqtile_to_trl",
        "    if unknown:\n",
        "    if False:\n",
        TRL,
        select="version",
    ),
    Mutant(
        "callback: Accelerate's autocast is lost",
        "_below_autocast",
        "model.forward = MethodType(convert_outputs_to_fp32(with_autocast), model)",
        "pass",
        ("integrations/test_trainer.py",),
        select="autocast",
    ),
    Mutant(
        "fit: the layer inputs go to the host before whole layers are tried",
        "",
        'Feature({"tiles": TILES}, "layers in chunks", "no more matmuls"),',
        'Feature({"tiles": TILES, "offload": ("activations",)}, "layers in chunks", "no more matmuls"),',
        ("test_fitting.py",),
    ),
)

"""Mutants of the plan of a training step's memory."""

from mutants_list.mutant import Mutant

PLAN = ("memory/test_plan.py",)
SIMULATION = ("memory/test_against_simulation.py",)

MUTANTS = (
    Mutant(
        "states: float32 weights are kept in float32 once more",
        "Setup.optimizer_bytes",
        "FLOAT if self.full and self.weight_bytes < FLOAT and self.optimizer",
        "FLOAT if self.full and self.optimizer",
        PLAN,
    ),
    Mutant(
        "setup: a ZeRO stage spreads what the next one does",
        "Setup.ranks",
        "self.gpus if self.zero_stage >= stage else 1",
        "self.gpus if self.zero_stage > stage else 1",
        PLAN,
    ),
    Mutant(
        "setup: ranks that do not divide the GPUs are not refused",
        "Setup.__post_init__",
        "self.gpus % self.sequence_parallel == 0",
        "self.gpus >= self.sequence_parallel",
        PLAN,
    ),
    Mutant(
        "layer: attention's workspace is not in float32",
        "Layer.__init__",
        "self.q * FLOAT // setup.bytes + (2",
        "self.q + (2",
        SIMULATION,
        select="every_architecture",
    ),
    Mutant(
        "tiled layer: sums of weight gradients are not in float32",
        "Layer._sums",
        "return parameters * FLOAT if self.setup.full else 0",
        "return parameters * self.setup.bytes if self.setup.full else 0",
        SIMULATION,
        select="as_a_whole",
    ),
    Mutant(
        "tiled layer: groups leave ranks without a kv head",
        "number_of_groups",
        "if kv_heads % n == 0 and kv_heads // n >= ranks)",
        "if kv_heads % n == 0)",
        PLAN,
    ),
    Mutant(
        "config: a bias of the output projection that Qwen2 has not",
        "",
        'Arch("qwen2", layer=True, attention_bias="qkv",',
        'Arch("qwen2", layer=True, attention_bias="qkvo",',
        PLAN,
    ),
    Mutant(
        "plan: the batch is not counted",
        "Batch.tokens",
        "return -(-self.seq_len // self.gpus) * self.rows",
        "return -(-self.seq_len // self.gpus)",
        SIMULATION,
        select="batch",
    ),
    Mutant(
        "plan: what sequences share is counted for each",
        "Batch.tokens",
        "return -(-(self.shared + self.own) // self.gpus)",
        "return -(-self.given // self.gpus)",
        PLAN,
        select="shared",
    ),
    Mutant(
        "plan: a call of attention is given too many keys",
        "Batch.calls",
        "if keys + self.seq_len > most:",
        "if keys + self.seq_len > 2 * most:",
        PLAN,
        select="shared",
    ),
    Mutant(
        "plan: several calls of attention save what they return",
        "Layer._tiled",
        "held = 0 if self.batch.shared else kept - self.q * past // count",
        "held = kept - self.q * past // count",
        SIMULATION,
        select="shared_tokens",
    ),
    Mutant(
        "plan: the longest sequence is a token short",
        "Predictor.longest",
        "while too_many - most > 1:",
        "while too_many - most > 2:",
        PLAN,
    ),
    Mutant(
        "step: what is on its way back is not counted",
        "Step._inputs",
        "min(waiting, max(kept, 1) + backward)",
        "min(waiting, max(kept, 1))",
        SIMULATION,
        select="every_feature or as_a_whole",
    ),
    Mutant(
        "step: all GPUs' host memory on one node",
        "Step.host",
        "size * min(setup.gpus, setup.gpus_per_node)",
        "size * setup.gpus",
        PLAN,
    ),
)

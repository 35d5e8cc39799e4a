"""Mutants of the plan of a training step's memory."""

from mutants_list.mutant import Mutant

PLAN = ("memory/test_plan.py",)
SIMULATION = ("memory/test_against_simulation.py",)

MUTANTS = (
    Mutant(
        "states: float32 weights are kept in float32 once more",
        "memory/step.py",
        "FLOAT if self.full and setup.bytes < FLOAT and setup.optimizer",
        "FLOAT if self.full and setup.optimizer",
        PLAN,
    ),
    Mutant(
        "setup: a ZeRO stage spreads what the next one does",
        "memory/setup.py",
        "self.gpus if self.zero_stage >= stage else 1",
        "self.gpus if self.zero_stage > stage else 1",
        PLAN,
    ),
    Mutant(
        "setup: ranks that do not divide the GPUs are not refused",
        "memory/setup.py",
        "if self.gpus % self.sequence_parallel:",
        "if self.gpus < self.sequence_parallel:",
        PLAN,
    ),
    Mutant(
        "layer: attention's workspace is not in float32",
        "memory/layer.py",
        "q * FLOAT // self.setup.bytes + expanded",
        "q + expanded",
        SIMULATION,
        select="every_architecture",
    ),
    Mutant(
        "tiled layer: sums of weight gradients are not in float32",
        "memory/tiled_layer.py",
        "return parameters * FLOAT if self.trained else 0",
        "return parameters * self.setup.bytes if self.trained else 0",
        SIMULATION,
        select="as_a_whole",
    ),
    Mutant(
        "tiled layer: groups leave ranks without a kv head",
        "memory/tiled_layer.py",
        "if heads % count == 0 and heads // count >= ranks]",
        "if heads % count == 0]",
        PLAN,
    ),
    Mutant(
        "config: a bias of the output projection that Qwen2 has not",
        "memory/config.py",
        'output_bias = 0 if model_type in ("qwen2", "glm4") else hidden',
        "output_bias = hidden",
        PLAN,
    ),
    Mutant(
        "plan: the batch is not counted",
        "memory/plan.py",
        "tokens = -(-seq_len // setup.sequence_parallel) * batch_size",
        "tokens = -(-seq_len // setup.sequence_parallel)",
        SIMULATION,
        select="batch",
    ),
    Mutant(
        "plan: the longest sequence is a token short",
        "memory/plan.py",
        "while too_long - fits > 1:",
        "while too_long - fits > 2:",
        PLAN,
    ),
    Mutant(
        "step: what is on its way back is not counted",
        "memory/step.py",
        "min(waiting, max(kept, 1) + backward)",
        "min(waiting, max(kept, 1))",
        SIMULATION,
        select="every_feature",
    ),
    Mutant(
        "step: all GPUs' host memory on one node",
        "memory/step.py",
        "size * min(setup.gpus, setup.gpus_per_node)",
        "size * setup.gpus",
        PLAN,
    ),
)

"""Mutants of `seqtile finetune`."""

from mutants_list.mutant import Mutant

RESUME, FINETUNE = ("recipes/test_resume.py",), ("recipes/test_finetune.py",)

MUTANTS = (
    Mutant(
        "finetune: a checkpoint is written where it is read",
        "Tuner._get_output_dir",
        "self.incomplete or super()._get_output_dir(trial)",
        "super()._get_output_dir(trial)",
        RESUME,
        select="one_process",
    ),
    Mutant(
        "finetune: options of the earlier run are not compared",
        "check_fixed_options",
        "if name in now and now[name] != before[name]:",
        "if name not in now:",
        RESUME,
        select="refused",
    ),
    Mutant(
        "finetune: a signal while the model is saved ends the run at once",
        "Monitor.on_signal",
        "if alone and (again or self.bar is None):",
        "if alone:",
        RESUME,
        select="after_the_last_step",
    ),
    Mutant(
        "finetune: weights are not looked at before they are saved",
        "Tuner._save_checkpoint",
        "        check_finite(self.model)\n",
        "",
        RESUME,
        select="not_finite",
    ),
    Mutant(
        "finetune: names of tables are patterns",
        "dataset_of",
        "glob.escape(str(table))",
        "str(table)",
        FINETUNE,
        select="held_another_model",
    ),
    Mutant(
        "finetune: JSON of an earlier model stays beside the new one",
        "written_beside",
        '{".safetensors", ".json", ".bin"}',
        '{".safetensors"}',
        FINETUNE,
        select="held_another_model",
    ),
    Mutant(
        "finetune: chats with roles that no template names are trained",
        "check_chats",
        "if role in SHAREGPT and role not in named",
        "if False",
        FINETUNE,
        select="cannot_be_trained",
    ),
    Mutant(
        "finetune: roles that the template names are refused",
        "check_chats",
        "and role not in named",
        "",
        FINETUNE,
        select="cannot_be_trained",
    ),
    Mutant(
        "finetune: rows need a file's name",
        "dataset_of",
        'names[0] if names else "the data"',
        "names[0]",
        FINETUNE,
        select="not_named",
    ),
)

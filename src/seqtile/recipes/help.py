"""What `seqtile finetune --help` says: the options that matter, quickly. `--help-all` lists TRL's as well."""

from rich.console import Console
from rich.table import Table

PANELS = {
    "Model and data": {
        "--model": "A local path, a hub name, or smollm2-135m (the default, from PyPI)",
        "--data": "Text files, directories of them; JSON, JSONL, CSV, Parquet with messages, prompt and completion, or "
        "text; or a data set of the hub. Default: the source of Python's standard library",
        "--seq-len": "Tokens a sequence at most (4096); text files become sequences of exactly so many",
        "--config": "A YAML file with any of these options",
    },
    "Training": {
        "--steps": "Training steps in total; default: one pass over the data, or --num-train-epochs",
        "--learning-rate": "The largest rate (1e-5; 2e-4 for adapters); it rises, then falls by --lr-scheduler-type",
        "--gradient-accumulation-steps": "Batches of a step (1)",
        "--packing": "Put short rows into one sequence; documents stay apart, which needs FlashAttention",
        "--assistant-only-loss": "Of chats train the assistant's tokens only",
        "--seed": "Of weights that are drawn, of dropout and of the order of the data (42)",
        "--compare": "Train the untiled model first, in a process of its own, and compare",
    },
    "Adapters": {
        "--use-peft": "Train LoRA's adapters (--lora-r 16, --lora-alpha 32) on a frozen base",
        "--load-in-4bit": "With --use-peft: the base in 4 bits (QLoRA)",
        "--merge": "Also write the merged model, to OUTPUT/merged",
    },
    "Memory": {
        "--layer": "Tile whole layers, everything except attention: longer sequences fit",
        "--head-groups": "With --layer: attention by groups of kv heads: a number, or auto",
        "--offload": "Keep the inputs of checkpointed layers in host memory, not on the GPU",
        "--fit": "Choose the cheapest of these three with which a step fits",
        "--dtype": "Of the weights (float32, under bfloat16 autocast on a GPU; bfloat16 of a base with adapters)",
    },
    "Several GPUs, under torchrun": {"--sequence-parallel": "GPUs that share a sequence (1)"},
    "Output": {
        "--output": "Directory of model, report and checkpoints (runs/finetune)",
        "--save-every": "A checkpoint every so many steps and at the end; default: if the run is ended early",
        "--resume": "Continue from the last checkpoint in --output, with the same options",
        "--device": "cpu or cuda; default: cuda if there is one",
    },
}


def print_help(console: Console) -> None:
    console.print("Usage: seqtile finetune [OPTIONS]\n", markup=False)
    console.print(
        "TRL's SFT with seqtile in it. On several GPUs: torchrun --nproc-per-node 8 -m seqtile.cli finetune ..."
    )
    for name, options in PANELS.items():
        table = Table("", "", title=f"\n{name}", title_justify="left", box=None, show_header=False, padding=(0, 2))
        for option, about in options.items():
            table.add_row(option, about)
        console.print(table)
    console.print("\nAll options of TRL's SFTConfig and ModelConfig are taken, as --use-peft or --use_peft: --help-all")

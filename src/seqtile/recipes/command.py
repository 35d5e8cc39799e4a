"""`seqtile finetune` from its command line: help, options, run."""

import logging
import warnings

import datasets
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from seqtile.recipes.finetune import end_with_parent
from seqtile.recipes.finetune import finetune as run
from seqtile.recipes.options import parsed


def finetune(arguments: list[str], console: Console) -> int | None:
    """Runs the command; returns the signal that ended it early, None if none did."""
    for name in ("bitsandbytes", "deepspeed", "DeepSpeed"):  # what they could not load, and what they found
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`gradient_checkpointing.*is deprecated")
    disable_progress_bar()
    datasets.disable_progress_bars()
    asked = parsed(arguments)
    if asked.own.untiled:
        end_with_parent()
    return run(asked, arguments, console)

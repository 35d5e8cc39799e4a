"""`seqtile finetune` from its command line: help, options, run."""

import warnings

import datasets
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from seqtile.recipes.finetune import end_with_parent
from seqtile.recipes.finetune import finetune as run
from seqtile.recipes.options import Parser, parsed


def finetune(arguments: list[str], console: Console, on_ranks: bool = False) -> int | None:
    """Runs the command; returns the signal that ended it early, None if none did."""
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated")  # TRL's own use of the older name
    disable_progress_bar()
    datasets.disable_progress_bars()
    if "--help-all" in arguments:
        Parser().print_help()
        return None
    asked = parsed(arguments, on_ranks)
    if asked.own.untiled:
        end_with_parent()
    return run(asked, arguments, console)

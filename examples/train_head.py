"""Train a head for your model with three commands of fsd-train. A real run has thousands of prompts and steps."""

import os
import sys
import tempfile
from pathlib import Path

from fsd_infer import FuzzyDecoder
from fsd_train.cli import main as fsd_train

TARGET = "smollm2-135m"  # or a directory or Hub id
PROMPTS = Path(__file__).resolve().parent.parent / "data" / "quickstart_prompts.jsonl"

os.chdir(tempfile.mkdtemp())  # the recipe writes to runs/ here
for command in (
    f"regenerate --target {TARGET} --prompts {PROMPTS} --output answers.jsonl --max-new-tokens 24",
    f"new-recipe --target {TARGET} --data answers.jsonl --output mine.yaml",
    "fit --config mine.yaml --trainer.max_steps 2 --data.validation_fraction 0.1",
):
    if fsd_train(command.split()):
        sys.exit(f"fsd-train {command} failed")
head = next(Path("runs").glob("*/head"))
made = FuzzyDecoder.from_pretrained(TARGET, str(head)).generate("Why is the sky blue?", max_new_tokens=16)
print(f"{head.resolve()}: {made.stats.acceptance_length:.2f} tokens per target forward")

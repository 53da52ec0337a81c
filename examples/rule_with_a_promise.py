"""Find the fastest rule that keeps a promise, and decode with it. A real calibration has hundreds of prompts."""

import shutil
import sys
import tempfile
from pathlib import Path

from fsd_bench.cli import main as fsd_bench
from fsd_infer import FuzzyDecoder
from fsd_infer.targets.builtin import shipped_drafter

TARGET = "smollm2-135m"  # or a directory or Hub id
PROMPTS = Path(__file__).resolve().parent.parent / "data" / "quickstart_prompts.jsonl"

out = Path(tempfile.mkdtemp())
head = shutil.copytree(shipped_drafter(TARGET), out / "head")  # use your own: the setting is stored in its directory
promise = "--at-most-nats 4"  # in any answer; with scored prompts --at-most-score-loss 2, in points of 100
command = f"calibrate --target {TARGET} --drafter {head} --prompts {PROMPTS} {promise} --rules tilted:2 "
if fsd_bench((command + f"--max-new-tokens 12 --confidence 0.5 --output {out / 'calibration'}").split()):
    sys.exit("the calibration failed")
made = FuzzyDecoder.from_pretrained(TARGET, str(head)).generate(
    "Why is the sky blue?", rule="calibrated", temperature=0
)
print(f"rule {made.stats.rule}: {made.stats.acceptance_length:.2f} tokens per target forward")

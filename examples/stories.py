"""Write the same story exactly and under lossy rules: TinyLlama is the target, a 15 M model drafts.

    python examples/stories.py [--target DIR] [--drafter DIR] [--beginning "Once upon a time ..."]

A drafted token that only the lossy rule accepts is printed in [brackets].
"""

import argparse

from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.rules import TokenOrigin

BEGINNINGS = [
    "Once upon a time, a little mouse found a golden key in the forest. It",
    "One rainy morning, Ella heard a strange noise in the kitchen. She",
]
RULES = {"exact": 4, "tilted:0.7:min_p=0": 8}  # each rule's chain length, in drafts

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--target", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0", help="directory or Hub id (%(default)s)")
parser.add_argument(
    "--drafter", default="Xenova/llama2.c-stories15M", help="directory or Hub id of a small LM (%(default)s)"
)
parser.add_argument("--beginning", nargs="+", default=BEGINNINGS, help="text to continue")
parser.add_argument("--rule", nargs="+", default=list(RULES))
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument("--temperature", type=float, default=0.0)
args = parser.parse_args()

decoder = FuzzyDecoder.from_pretrained(args.target, "none")
for beginning in args.beginning:
    print(f"\n{beginning}")
    for rule in args.rule:
        depth = RULES.get(rule, 8)
        drafter = decoder.load_drafter(args.drafter, TreeShape(depth, 1, depth + 1))
        options = {"chat": False, "do_sample": args.temperature > 0, "temperature": args.temperature, "seed": 0}
        decoder.generate([beginning], rule=rule, drafter=drafter, max_new_tokens=4, **options)  # warm-up
        made = decoder.generate([beginning], rule=rule, drafter=drafter, max_new_tokens=args.max_new_tokens, **options)
        record, row = made.records[0], made.stats.rows[0]
        ids, story = made.sequences[0], ""
        for end in range(1, len(ids) + 1):  # a token's text depends on the tokens before it
            piece = decoder.tokenizer.decode(ids[:end])[len(decoder.tokenizer.decode(ids[: end - 1])) :]
            story += f"[{piece}]" if record.sources[end - 1] == TokenOrigin.GATE else piece
        speed = f"{row.tokens_per_second:.0f} tokens/s, {row.acceptance_length:.1f} per target forward"
        nats, repeats = row.divergence_spent / row.new_tokens, row.repeated_4grams or 0
        print(f"\n{rule}: {speed}, {nats:.2f} nats per token, {repeats:.0%} repeated 4-grams\n{story}")

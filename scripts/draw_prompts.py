"""Lets the target itself write prompts, and writes them as a JSONL file for `fsd-train regenerate`.

An instruction-tuned model that is given its chat template up to the point where the user's words begin goes on with a
plausible request, close to what it was tuned on (the Magpie method, Xu et al. 2024, arXiv 2406.08464). A drafter
needs answers to requests of many kinds, and these cost nothing but a few tokens each. No benchmark is read.

  python scripts/draw_prompts.py --tokenizer DIR --endpoint http://127.0.0.1:8000 --model NAME --count 3000 --output F
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from fsd_infer.errors import FsdError
from fsd_infer.openai_client import Server

MARK = "\x1eREQUEST\x1e"

OPENINGS = """
What; What is; How do I; How does; Why; Can you; Could you; Write; Write a; Explain; Describe; Summarize; Imagine;
Create; Compose; Help me; Give me; I; I'm; I need; I have; My; Let's; You are; Pretend; Design; Compare; Discuss; Tell
me; Suppose; If; A; The; In; Who; Which; When; Find; Solve; Calculate; Translate; Rewrite; Generate; Draft; Act as;
Identify; List; Extract; Consider; Analyze; Plan; Is it; Are there; Develop; Edit; Evaluate
"""


def template_before_request(tokenizer: Any) -> str:
    """The chat template's text from its start up to the place where the user's words begin."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    return text.split(MARK)[0]


def completions(server: Server, model: str, prompt: str, count: int, stop: Sequence[str]) -> list[str]:
    """``count`` sampled continuations of ``prompt`` that ended by themselves."""
    body = {
        "model": model,
        "prompt": prompt,
        "n": count,
        "max_tokens": 72,
        "temperature": 0.9,
        "stop": list(stop),
    }
    choices = server.complete(body)["choices"]
    return [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]


def worth_asking(text: str, length: int) -> bool:
    """Whether a drawn text can serve as a request: of fair length, mostly letters, not one phrase over and over."""
    words = re.findall(r"\w+", text.lower())
    return (
        5 <= length <= 70 and len(set(words)) >= 0.45 * len(words) and sum(c.isascii() for c in text) >= 0.9 * len(text)
    )


def draw(args: argparse.Namespace, tokenizer: Any) -> Iterator[str]:
    """Requests in the order in which the server completes them, each once."""
    servers = [Server(url, attempts=6, connections=args.concurrency) for url in args.endpoint]
    start = template_before_request(tokenizer)
    stop = [tokenizer.eos_token] if tokenizer.eos_token else []
    rng = random.Random(args.seed)
    openings = ["", *(" ".join(text.split()) for text in OPENINGS.split(";"))]
    seen: set[str] = set()
    with ThreadPoolExecutor(args.concurrency) as pool:
        while len(seen) < args.count:
            waiting = {}
            for i in range(4 * args.concurrency):
                opening = rng.choice(openings) if rng.random() < args.opened else ""
                server = servers[i % len(servers)]
                job = pool.submit(completions, server, args.model, start + opening, 4, stop)
                waiting[job] = opening
            for job in as_completed(waiting):
                for text in job.result():
                    request = (waiting[job] + text).strip()
                    if request not in seen and worth_asking(request, len(tokenizer.encode(request))):
                        seen.add(request)
                        yield request
                        if len(seen) == args.count:
                            pool.shutdown(cancel_futures=True)
                            return


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", required=True, help="directory or hub id with the target's tokenizer")
    p.add_argument("--endpoint", nargs="+", required=True, help="OpenAI-compatible servers of the target")
    p.add_argument("--model", required=True, help="the target's name at the servers")
    p.add_argument("--count", type=int, default=3000)
    p.add_argument("--opened", type=float, default=0.6, help="share of requests whose first words are prescribed")
    p.add_argument("--concurrency", type=int, default=32)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--output", type=Path, required=True)
    args = p.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with open(args.output, "w", encoding="utf-8") as file:
        try:
            for request in tqdm(draw(args, tokenizer), total=args.count, unit=" prompts"):
                file.write(json.dumps({"prompt": request, "source": "magpie"}, ensure_ascii=False) + "\n")
        except FsdError as error:
            print(f"draw_prompts: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

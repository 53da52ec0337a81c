"""Comparison of a server's answers and acceptance with ours, for `fsd-train doctor --url`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import requests

from fsd_bench.openai_client import EXTENSIONS, UNSHAPED, Server
from fsd_infer.errors import FsdError
from fsd_train.commands.feeding import Finding

Counts = tuple[float, list[float]]  # drafts, accepted ones by position
_POSITION = re.compile(r'^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{.*position="(\d+)".*\} (\S+)$', re.M)
_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts(?:_total)?(?:\{.*\})? (\S+)$", re.M)


def check_engine(
    server: Server, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], reached: Sequence[float]
) -> list[Finding]:
    """Compare a server's answers to the same prompts with ours.

    Args:
        server: an OpenAI-compatible server, for acceptance with vLLM's metrics.
        prompts, answers: token ids of the prompts and of our greedy answers.
        reached: our acceptance by depth, given that the depth before was accepted.
    """
    before = acceptance_counts(server.url)
    same, silent = 0, 0
    try:
        model = server.models()[0]["id"]
        for prompt, answer in zip(prompts, answers, strict=True):
            body = {"model": model, "prompt": list(prompt), "max_tokens": len(answer), "temperature": 0.0, **UNSHAPED}
            ids = _ids(server.complete(body, EXTENSIONS))
            silent += ids is None
            same += ids in (list(answer), list(answer[:-1]))  # some servers omit the end token
    except FsdError as error:
        return [Finding("engine", False, str(error).rstrip("."), "start the server, or omit --url")]
    return [
        _compare_answers(same, silent, len(prompts)),
        _compare_acceptance(server.url, before, acceptance_counts(server.url), reached),
    ]


def _compare_answers(same: int, silent: int, asked: int) -> Finding:
    check = "engine's answers"
    if silent:
        return Finding(check, None, f"{silent} of {asked} came without token ids, so there is nothing to compare")
    fine = same >= 0.8 * asked  # rounding changes a few
    fix = "the server has another target, dtype or template: start it with this target"
    return Finding(check, fine, f"{same} of {asked} equal ours", "" if fine else fix)


def _compare_acceptance(url: str, before: Counts | None, after: Counts | None, reached: Sequence[float]) -> Finding:
    check = "engine's acceptance"
    if before is None or after is None:
        return Finding(check, None, f"{url} has no metrics of drafts by position")
    drafts = after[0] - before[0]
    if not drafts:
        return Finding(check, False, "the server drafted nothing", "start it with the head")
    theirs = [(late - early) / drafts for late, early in zip(after[1], before[1], strict=True)][: len(reached)]
    ours = [math.prod(reached[: depth + 1]) for depth in range(len(theirs))]
    says = "accepted by position: " + " ".join(f"{value:.0%}" for value in theirs)
    says += "; ours " + " ".join("-" if math.isnan(value) else f"{value:.0%}" for value in ours)
    noise = max(0.1, 3 * math.sqrt(0.5 / drafts))
    fine = not any(abs(a - b) > noise for a, b in zip(theirs, ours, strict=True))
    fix = "the server feeds the head differently: compare layer ids, norm flags and the exported config with this table"
    return Finding(check, fine, says, "" if fine else fix)


def acceptance_counts(url: str) -> Counts | None:
    """Read the number of drafts and of accepted ones by position from vLLM's metrics; None without them."""
    parts = urlsplit(url)
    try:
        text = requests.get(f"{parts.scheme}://{parts.netloc}/metrics", timeout=10).text
    except requests.RequestException:
        return None
    drafts, places = _DRAFTS.findall(text), _POSITION.findall(text)
    if not drafts or not places:
        return None
    counts = [0.0] * (1 + max(int(place) for place, _ in places))
    for place, count in places:
        counts[int(place)] += float(count)
    return sum(map(float, drafts)), counts


def _ids(reply: object) -> list[int] | None:
    try:
        return list(reply["choices"][0]["token_ids"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return None

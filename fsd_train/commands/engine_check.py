"""A server's answers and acceptance beside our own, for `fsd-train doctor --url`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import requests

from fsd_bench.openai_client import EXTENSIONS, UNSHAPED, Server
from fsd_infer.errors import FsdError

Line = tuple[str, bool | None, str, str]  # check, ok, what was found, the fix
Counts = tuple[float, list[float]]  # drafts, accepted ones by position
_POSITION = re.compile(r'^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{.*position="(\d+)".*\} (\S+)$', re.M)
_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts(?:_total)?(?:\{.*\})? (\S+)$", re.M)


def check_engine(
    server: Server, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], reached: Sequence[float]
) -> list[Line]:
    """Let a server answer the same prompts and compare.

    Args:
        server: speaks the OpenAI API and, for acceptance, has vLLM's metrics.
        prompts, answers: ids, and what our greedy decoding gave.
        reached: our acceptance by depth, each where the one before was accepted.
    """
    before = acceptance_counts(server.url)
    same, silent = 0, 0
    try:
        model = server.models()[0]["id"]
        for prompt, answer in zip(prompts, answers, strict=True):
            body = {"model": model, "prompt": list(prompt), "max_tokens": len(answer), "temperature": 0.0, **UNSHAPED}
            ids = _ids(server.complete(body, EXTENSIONS))
            silent += ids is None
            same += ids in (list(answer), list(answer[:-1]))  # some keep the end token to themselves
    except FsdError as error:
        return [("engine", False, str(error).rstrip("."), "start the server, or leave --url out")]
    return [
        _compare_answers(same, silent, len(prompts)),
        _compare_acceptance(server.url, before, acceptance_counts(server.url), reached),
    ]


def _compare_answers(same: int, silent: int, asked: int) -> Line:
    check = "engine's answers"
    if silent:
        return check, None, f"{silent} of {asked} came without token ids, so there is nothing to compare", ""
    fine = same >= 0.8 * asked  # rounding turns a few
    fix = "it runs another target, dtype or template: start it with this target"
    return check, fine, f"{same} of {asked} are ours", "" if fine else fix


def _compare_acceptance(url: str, before: Counts | None, after: Counts | None, reached: Sequence[float]) -> Line:
    check = "engine's acceptance"
    if before is None or after is None:
        return check, None, f"{url} has no metrics of drafts by position", ""
    drafts = after[0] - before[0]
    if not drafts:
        return check, False, "the server drafted nothing", "start it with the head"
    theirs = [(late - early) / drafts for late, early in zip(after[1], before[1], strict=True)][: len(reached)]
    ours = [math.prod(reached[: depth + 1]) for depth in range(len(theirs))]
    says = "accepted by position: " + " ".join(f"{value:.0%}" for value in theirs)
    says += "; ours " + " ".join("-" if math.isnan(value) else f"{value:.0%}" for value in ours)
    noise = max(0.1, 3 * math.sqrt(0.5 / drafts))
    fine = not any(abs(a - b) > noise for a, b in zip(theirs, ours, strict=True))
    fix = "it feeds the head otherwise: compare layer ids, norm flags and the exported config with this table"
    return check, fine, says, "" if fine else fix


def acceptance_counts(url: str) -> Counts | None:
    """(drafts, accepted ones by position) from a server's metrics, as vLLM has them; None where there are none."""
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

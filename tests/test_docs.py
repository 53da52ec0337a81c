"""What pages say of the code and of records is what these hold."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.findings import beside_exact
from benchmarks.findings import tables as sweep
from fsd_infer.engine import round as round_module
from fsd_infer.rules import Evidence, Tilted, Verification
from fsd_infer.rules.laws import clipped
from fsd_infer.tree import DraftTree


def test_the_page_of_a_round_shows_the_round(repo_root: Path) -> None:
    """Line by line, in the order of the code."""
    page = (repo_root / "docs" / "how-a-round-works.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```python\n(tree = state.*?)```", page, re.DOTALL)
    code = inspect.getsource(round_module).replace("made.verdict", "verdict")
    lines = sorted(shown.splitlines(), key=code.index)
    steps = ["session.draft", "verify(", "accept(", "cache.commit", "state.extend", "advance("]
    assert len(lines) == 6 and all(step in line for step, line in zip(steps, shown.splitlines(), strict=True)), lines


def record(repo_root: Path, name: str) -> dict[str, Any]:
    return json.loads((repo_root / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


COMPARED, GREEDY, SAMPLED = "compare-smollm2-135m", "rules-smollm2-135m-t0-lookup", "rules-smollm2-135m-t1-lookup"
# a page, a record, and what the page says of it
QUOTED = [
    ("decoding", COMPARED, "has τ {exact@lookup+recycle/tau:.2f} where lookup has {exact@lookup/tau:.2f}"),
    ("decoding", COMPARED, "{exact@lookup+recycle/tau_category_mean:.2f} and {exact@lookup/tau_category_mean:.2f};"),
    ("gpu", "predicted-rounds", "A plain round takes {plain/measured/round:.2f} ms"),
    ("gpu", "predicted-rounds", "where {plain/predicted/round:.2f} were predicted"),
    ("gpu", "predicted-rounds", "an exact round {exact/measured/round:.2f} where {exact/predicted/round:.2f} were"),
    ("gpu", "predicted-rounds", "its draft {exact/measured/draft:.2f} where {exact/predicted/draft:.2f} were"),
    ("ladder", GREEDY, "`tilted:2` is {tilted/speed:.2f} times as fast as `exact` for {tilted/lost:.2f} nats"),
    ("ladder", GREEDY, "`tilted:1:floor=0` {tilted 1 floor 0/speed:.2f} times for {tilted 1 floor 0/lost:.2f},"),
    ("ladder", GREEDY, "`typical:novel=3` {typical novel 3/speed:.2f} and"),
    ("ladder", GREEDY, "`relaxed:novel=3` {relaxed novel 3/speed:.2f} times for {relaxed novel 3/lost:.2f}."),
    ("ladder", GREEDY, "emits {tilted 1 novel 0 floor 0/more:.2f} times as much per forward, with "
     "{tilted 1 novel 0 floor 0/copies:.0f} points more copied 4-grams"),
    ("ladder", SAMPLED, "`tilted:1.5` is {tilted/speed:.2f} times as fast for {tilted/divergence_spent:.1f} nats"),
    ("ladder", SAMPLED, "`fuzzy:js:0.3` {fuzzy js 0.3/speed:.2f} for {fuzzy js 0.3/divergence_spent:.1f},"),
    ("ladder", SAMPLED, "`cactus:0.25` {cactus 0.25/speed:.2f} for {cactus 0.25/divergence_spent:.1f},"),
    ("ladder", SAMPLED, "`typical:novel=3` {typical novel 3/speed:.2f} for {typical novel 3/divergence_spent:.1f}."),
]  # fmt: skip


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    """What a record has of each method, and of each rule beside exact."""
    facts: dict[str, Any] = found["milliseconds"] if "milliseconds" in found else found["methods"]
    for name, less in found.get("differences", {}).get("exact", {}).items():
        facts[name]["speed"] = found["ratios"]["exact"][name]["tokens_per_second"]["median"]
        facts[name]["more"] = facts[name]["tau"] / facts["exact"]["tau"]
        facts[name]["lost"] = -less["log_likelihood_per_token"]["mean"]
        facts[name]["copies"] = 100 * less["copied_4grams"]["mean"]
    return facts


@pytest.mark.parametrize(("page", "name", "text"), QUOTED)
def test_numbers_in_the_text_are_those_of_records(page: str, name: str, text: str, repo_root: Path) -> None:
    facts = facts_of(record(repo_root, name))

    def number(match: re.Match[str]) -> str:
        *keys, last = match[1].split("/")
        return format(functools.reduce(dict.__getitem__, keys, facts)[last], match[2])

    said = " ".join((repo_root / "docs" / f"{page}.md").read_text(encoding="utf-8").split())
    assert re.sub(r"\{(.+?):(.+?)\}", number, text) in said


def test_tables_of_rules_are_what_their_records_say(repo_root: Path) -> None:
    """Each row on the page is a row of a record, and each record of the tables has a row there."""
    page = (repo_root / "docs" / "ladder.md").read_text(encoding="utf-8")
    header = sweep({"temperatures": {"0": {"exact": {"tau": 1.0, "means": {}}}}}).splitlines()[2]
    blocks = [block.splitlines() for block in page.split("\n\n")]
    shown = {line for block in blocks if block[0] == header for line in block if line.startswith("| `")}
    names = ("stories", "stories-distilled", "ifeval", "translations", "summaries")
    tables = [set(sweep(record(repo_root, f"findings-{name}")).splitlines()) for name in names]
    assert len(shown) >= 12 and shown <= set().union(*tables) and all(table & shown for table in tables)


def test_the_table_of_findings_is_its_records(repo_root: Path) -> None:
    page = (repo_root / "docs" / "findings.md").read_text(encoding="utf-8").replace("**", "")
    rows = {line.partition(" |")[0]: line for line in page.splitlines() if line.startswith("| `")}
    said = [
        beside_exact(record(repo_root, f"rules-ifeval-odd{name}")).splitlines() for name in ("", "-rivals", "-lead")
    ]
    assert set(rows.values()) <= {line for lines in said for line in lines} and len(rows) >= 6
    assert len(page.split()) <= 1500


def test_the_table_of_a_small_lms_losses_is_its_record(repo_root: Path) -> None:
    page = (repo_root / "docs" / "losses.md").read_text("utf-8").partition("| loss | first draft")[2]
    losses = record(repo_root, "stories-training-seeds")["losses"]

    def span(facts: dict[str, float]) -> str:
        return (
            "1" if facts["low"] == facts["high"] else f"{facts['ratio']:.2f} ({facts['low']:.2f}–{facts['high']:.2f})"
        )

    rows = [line.strip("| ").split(" | ") for line in page.partition("\n\n")[0].splitlines()[2:]]
    for loss, row in zip(losses, rows, strict=True):
        exact, rule = losses[loss]["exact"], losses[loss]["tilted:1:floor=0"]
        assert row[0].strip("`").startswith({"public": "none"}.get(loss, loss.replace("-", ":")))
        assert row[1:4] == [
            f"{exact['agreement']:.0%}".replace("%", " %"),
            f"{exact['regret_median']:.2f}",
            f"{exact['regret_below_1']:.0%}".replace("%", " %"),
        ]
        assert row[4:6] == [f"{exact['tokens_per_cost']:.2f}", span(exact["x_public"])]
        assert row[6:8] == [f"{rule['tokens_per_cost']:.2f}", span(rule["x_first"])]
        assert row[8:] == [f"{rule['nats_per_token']:.3f}", f"{rule['repeated_4grams']:.2f}"], loss


def test_the_table_of_engines_is_its_record(repo_root: Path) -> None:
    page, found = (repo_root / "docs" / "speed.md").read_text("utf-8"), record(repo_root, COMPARED)
    engines = {"llama.cpp:gguf": "llama.cpp", "openvino:gguf": "OpenVINO", "vllm": "vLLM, bf16"}
    for name, shown in {"plain": "`plain`", "exact": "`exact`", **engines}.items():
        facts, ratio = found["methods"][name], found["ratios"]["plain"].get(name, {}).get("decode_tokens_per_second")
        span = f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else "1"
        tokens = f"{facts['decode_tokens_per_second']:.0f} | {facts['tokens_per_second']:.0f}"
        assert f"| {shown} | {tokens} | {span} |" in page, name


def test_links_lead_somewhere(repo_root: Path) -> None:
    rooms = ("docs", "benchmarks", "data", "recipes", "fsd_core", "fsd_infer", "fsd_train")
    pages = [repo_root / "README.md", *(page for room in rooms for page in (repo_root / room).rglob("*.md"))]
    dead = [
        f"{page}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not dead and len(pages) > 20


def test_every_page_is_on_the_site(repo_root: Path) -> None:
    """`make docs` builds the site and fails at a page that does not exist."""
    listed = re.findall(r": ([a-z-]+\.md)$", (repo_root / "mkdocs.yml").read_text("utf-8"), re.M)
    pages = {page.name for page in (repo_root / "docs").glob("*.md")} - {"README.md"}  # the list of pages itself
    assert set(listed) == pages | {"index.md", "reference.md"} and len(listed) == len(set(listed))


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_takes_nothing_from_elsewhere(repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="no MkDocs Material: pip install 'fsd-toolkit[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {page: page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    fetched = r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//"""
    assert len(pages) > 20 and not [page for page, html in pages.items() if re.search(fetched, html)]
    reference = pages[tmp_path / "reference" / "index.html"]
    assert "FuzzyDecoder" in reference and ":class:" not in reference


def test_the_code_on_the_page_of_extensions_runs(repo_root: Path) -> None:
    """In a process of its own, since it registers what it adds; the rules are then tried on a round."""
    page = (repo_root / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") >= 4
    tried = """
import torch
from fsd_core.divergence import divergence
from fsd_infer.rules import parse_rule
from tests.loss_toys import build_loss, make_batch
from tests.tree_rounds import assert_same, chain_round, tree_round
losses = [build_loss(*each)(make_batch().batch()).loss for each in (("missed", {"weight": 2.0}), ("tv", {}))]
torch.testing.assert_close(losses[0], 2 * losses[1])
for greedy in (True, False):
    for round in (tree_round(0, greedy=greedy), chain_round(0, greedy=greedy)):
        lengths = [parse_rule(spec)(round).accepted.sum() for spec in ("near-best:0.1", "near-best:0.5", "exact")]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2]
        assert_same(parse_rule("near-best:1.1")(round), parse_rule("exact")(round))
        assert_same(parse_rule("my-fuzzy:0.1")(round), parse_rule("fuzzy:js:0.1")(round))
        assert_same(parse_rule("fuzzy:overlap:0.1")(round), parse_rule("fuzzy:tv:0.1")(round))
"""
    command = [sys.executable, "-c", "\n".join(blocks) + tried]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_numbers_on_the_page_of_the_optimal_rule(repo_root: Path) -> None:
    page = (repo_root / "docs" / "optimal-rule.md").read_text(encoding="utf-8")
    root, below = torch.tensor([0.5, 0.3, 0.1, 0.1]).log(), torch.tensor([0.2, 0.1, 0.6, 0.1]).log()
    logits = torch.stack([root, below, below])[None]
    tree = DraftTree.chain(torch.tensor([[0, 1, 2]]), logits[:, :2])
    evidence = Evidence(Verification(tree, logits, logits, False, torch.rand(1, 3, 3)))
    law = Tilted(1.0, floor=0.0, novel=0).law(evidence).log_probs(evidence).exp()[0]
    b, c = float(law[0, 1]), float(law[1, 2])
    drafts, value = b * (1 + c), math.log(0.7 + 0.3 * math.exp(1 + math.log(0.4 + 0.6 * math.e)))
    shown = [f"r(c) = 0.6·e / Z = {c:.4f}", f"/ Z = {b:.4f}", f"{drafts:.4f}; exact", f"V = {value:.4f}"]
    shown += [f"({drafts:.4f} − {value:.4f}) / λ | {drafts - value:.4f}"]
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.2, 0.6]]).double()
    r = clipped(p.log(), q.log(), torch.full_like(p, math.log(2))).exp()
    shown += ["r = (" + ", ".join(f"{x:.4g}" for x in r[0].tolist()) + ")"]
    shown += [f"= {float(r.minimum(q).sum()):.4f} instead", f"= {float((r * (r / p).log()).sum()):.4f} nats"]
    for text in shown:
        assert text in page, text

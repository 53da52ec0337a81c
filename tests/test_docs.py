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

from benchmarks.results_page import filled, middle
from benchmarks.tables import difference, ratio
from fsd_infer.engine.round import decode_round
from fsd_infer.rules import RoundInput, RuleInputs, Tilted
from fsd_infer.rules.optimal import clipped_distribution
from fsd_infer.trees.tree import DraftTree
from tests.output_probs import output_probs


def test_the_page_of_a_round_shows_the_round(repo_root: Path) -> None:
    """Line by line, in the order of the code."""
    page = (repo_root / "docs" / "internals.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```python\n(tree = state.*?)```", page, re.DOTALL)
    code, lines = inspect.getsource(decode_round), shown.splitlines()
    steps = ["session.draft", "verify(", "accept(", "commit(", "advance("]
    assert lines == sorted(lines, key=code.index)
    assert all(step in line for step, line in zip(steps, lines, strict=True)), lines


def record(repo_root: Path, name: str) -> dict[str, Any]:
    return json.loads((repo_root / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


# a page, a record, and what the page says of it: {key/key:format} of a method
QUOTED = [
    ("rules", "rules-ifeval-odd-lead", "`tilted` | {tilted/more:ratio} | {tilted/score:points} | {tilted/nats:.3f}"),
    ("rules", "rules-ifeval-odd-lead", "| {fly:window=3:novel=3:lead=5/more:ratio} | "
     "{fly:window=3:novel=3:lead=5/score:points} | {fly:window=3:novel=3:lead=5/nats:.3f} |"),
    ("rules", "rules-ifeval-odd-rivals", "| {tilted:heat=0.3/more:ratio} | {tilted:heat=0.3/score:points} |"),
    ("rules", "rules-ifeval-odd-rivals", "| `mars` | {mars/more:ratio} | {mars/score:points} | {mars/nats:.3f} |"),
    ("rules", "rules-ifeval-odd-rivals", "| `asd` | {asd/more:ratio} | {asd/score:points} | {asd/nats:.3f} |"),
    ("rules", "rules-stories", "`typical` emitted {typical:exact_ngram_size=3/more:ratio} × `exact`'s tokens at "
     "{typical:exact_ngram_size=3/score:points} points."),
    ("README", "rules-made-late", "{tilted/more:ratio} × `exact`'s tokens per forward | instructions followed: "
     "{tilted/score:points} points"),
    ("README", "compare-smollm2-135m", "| {hf-generate/tokens_per_second:.0f} tok/s | "
     "{plain/tokens_per_second:.0f} | {exact/tokens_per_second:.0f} |"),
    ("README", "compare-smollm2-135m-amx", "| {hf-generate/tokens_per_second:.0f} tok/s | "
     "{plain/tokens_per_second:.0f} | {exact/tokens_per_second:.0f} |"),
    ("README", "compare-smollm2-135m", "llama.cpp has {llama.cpp:gguf/tokens_per_second:.0f}, OpenVINO "
     "{openvino:gguf/tokens_per_second:.0f} and vLLM {vllm/tokens_per_second:.0f}."),
    ("internals", "drawn-240-1.0", "`exact` emits {drawn/tau:.2f} tokens per forward instead of "
     "{likely/tau:.2f}"),
    ("optimal-rule", "drawn-lossy-1.0", "emits {tilted/tau:.2f} tokens per forward for "
     "{tilted/nats:.3f} nats per token on such trees, and {tilted-likely/tau:.2f} for {tilted-likely/nats:.3f}"),
]  # fmt: skip


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    """What a record has of each method, and of each rule beside exact."""
    facts: dict[str, Any] = found["methods"]
    for facts_of_one in facts.values():
        facts_of_one["nats"] = (facts_of_one["divergence_spent"] or 0) / facts_of_one["answer_tokens"]
    for name, less in found.get("differences", {}).get("exact", {}).items():
        facts[name] |= {"more": found["ratios"]["exact"][name]["tau"], "score": less.get("score")}
    return facts


@pytest.mark.parametrize(("page", "name", "text"), QUOTED)
def test_numbers_in_the_text_are_those_of_records(page: str, name: str, text: str, repo_root: Path) -> None:
    facts = facts_of(record(repo_root, name))

    def number(match: re.Match[str]) -> str:
        *keys, last = match[1].split("/")
        value = functools.reduce(dict.__getitem__, keys, facts)[last]
        return {"ratio": ratio, "points": points}.get(match[2], lambda value: format(value, match[2]))(value)

    file = repo_root / ("README.md" if page == "README" else f"docs/{page}.md")
    said = " ".join(file.read_text(encoding="utf-8").split())
    assert re.sub(r"\{(.+?):([^:}]+)\}", number, text) in said


def points(values: dict[str, float]) -> str:
    return difference(values, 100, 1)


def test_results_are_printed_from_their_records(repo_root: Path) -> None:
    page = (repo_root / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    assert filled(page) == page, "run python -m benchmarks.findings"
    assert page.count("<!-- end -->") > 30


def test_pages_stay_short(repo_root: Path) -> None:
    """A reader's evening: README and eleven pages."""
    pages = [repo_root / "README.md", *(repo_root / "docs").glob("*.md")]
    assert len(pages) <= 12 and sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 12_000


def test_the_table_of_engines_is_its_record(repo_root: Path) -> None:
    page, found = (repo_root / "docs" / "performance.md").read_text("utf-8"), record(repo_root, "compare-smollm2-135m")
    engines = {"llama.cpp:gguf": "llama.cpp", "openvino:gguf": "OpenVINO", "vllm": "vLLM, bf16"}
    for name, shown in {"plain": "`plain`", "exact": "`exact`", **engines}.items():
        facts, beside = found["methods"][name], found["ratios"]["plain"].get(name, {}).get("decode_tokens_per_second")
        tokens = f"{facts['decode_tokens_per_second']:.0f} | {facts['tokens_per_second']:.0f}"
        assert f"| {shown} | {tokens} | {middle(beside) if beside else '1'} |" in page, name


def test_the_first_table_is_not_read_without_its_paired_ratios(repo_root: Path) -> None:
    page = " ".join((repo_root / "README.md").read_text("utf-8").split())
    records = [record(repo_root, f"compare-smollm2-135m{machine}") for machine in ("", "-amx", "-avx2")]
    paired = [middle(found["ratios"]["plain"]["exact"]["tokens_per_second"]) for found in records]
    assert "`exact` has {}, {} and {} times the speed without drafts".format(*paired) in page


def test_links_lead_somewhere(repo_root: Path) -> None:
    """To a file that exists, and to a heading of it."""
    rooms = ("docs", "benchmarks", "data", "recipes", "fsd_core", "fsd_infer", "fsd_train")
    pages = [*repo_root.glob("*.md"), *(page for room in rooms for page in (repo_root / room).rglob("*.md"))]
    links = {
        (page, link, anchor)
        for page in pages
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8"))
        if "://" not in link
    }

    def leads(page: Path, link: str, anchor: str) -> bool:
        file = page.parent / link if link else page
        return file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file))

    assert [link for link in links if not leads(*link)] == [] and len(links) > 150


def anchors(page: Path) -> set[str]:
    """What links to headings end with: lower case, hyphens for spaces, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_on_the_site(repo_root: Path) -> None:
    """`make docs` builds the site and fails at a page that does not exist."""
    listed = re.findall(r": ([a-z-]+\.md)$", (repo_root / "mkdocs.yml").read_text("utf-8"), re.M)
    pages = {page.name for page in (repo_root / "docs").glob("*.md")}
    assert set(listed) == pages | {"index.md", "reference.md"} and len(listed) == len(set(listed))


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_takes_nothing_from_elsewhere(repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="no MkDocs Material: pip install 'fsd-toolkit[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {page: page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    fetched = r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//"""
    assert len(pages) > 12 and not [page for page, html in pages.items() if re.search(fetched, html)]
    reference = pages[tmp_path / "reference" / "index.html"]
    assert "FuzzyDecoder" in reference and ":class:" not in reference


def test_the_code_on_the_page_of_extensions_runs(repo_root: Path) -> None:
    """In a process of its own, since it registers what it adds. Each is then tried."""
    page = (repo_root / "docs" / "internals.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page.partition("## Write your own")[2], re.DOTALL)
    assert len(blocks) >= 6
    tried = """
import torch
from fsd_core.divergence import divergence
from fsd_infer.backends.choose import choose
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import NoDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.rules import parse_rule
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import parse_tree
from tests.families import tiny_model, tiny_prompts
from tests.loss_toys import build_loss, make_batch
from tests.tree_rounds import OneByOne, assert_same, chain_round, tree_round
losses = [build_loss(*each)(make_batch().batch()).loss for each in (("missed", {"weight": 2.0}), ("tv", {}))]
torch.testing.assert_close(losses[0], 2 * losses[1])
for greedy in (True, False):
    for round in (tree_round(0, greedy=greedy), chain_round(0, greedy=greedy)):
        lengths = [parse_rule(spec)(round).accepted.sum() for spec in ("near-best:0.1", "near-best:0.5", "exact")]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2]
        assert_same(parse_rule("near-best:1.1")(round), OneByOne()(round))
        assert_same(parse_rule("my-fuzzy:0.1")(round), parse_rule("fuzzy:js:0.1")(round))
        assert_same(parse_rule("fuzzy:overlap:0.1")(round), parse_rule("fuzzy:tv:0.1")(round))
assert choose("xpu").name == "xpu" and choose("xpu") is choose("xpu:1")
target, prompts = Target(tiny_model("llama")), tiny_prompts()
decoder = FuzzyDecoder(target, NoDrafter(target.vocab_size))
tried = ("bigram", "auto", 1), ("recycle+bigram", "auto", 1), ("bigram", None, 1), ("bigram", None, 2)
for name, tree, beams in tried:
    options = dict(num_beams=beams, max_new_tokens=24, do_sample=False)
    plain = decoder.generate(prompts, **options)
    drafted = decoder.generate(prompts, drafter=load_drafter(name, target, parse_tree(tree)), **options)
    assert drafted.sequences == plain.sequences
assert drafted.stats.target_forwards < plain.stats.target_forwards
"""
    command = [sys.executable, "-c", "\n".join(blocks) + tried]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_numbers_on_the_page_of_the_optimal_rule(repo_root: Path) -> None:
    page = (repo_root / "docs" / "optimal-rule.md").read_text(encoding="utf-8")
    root, below = torch.tensor([0.5, 0.3, 0.1, 0.1]).log(), torch.tensor([0.2, 0.1, 0.6, 0.1]).log()
    logits = torch.stack([root, below, below])[None]
    tree = DraftTree.chain(torch.tensor([[0, 1, 2]]), logits[:, :2])
    inputs = RuleInputs(RoundInput(tree, logits, logits, False, torch.rand(1, 3, 3)))
    distribution = output_probs(Tilted(1.0, min_p=0.0, exact_ngram_size=0).output(inputs), inputs)[0]
    b, c = float(distribution[0, 1]), float(distribution[1, 2])
    drafts, value = b * (1 + c), math.log(0.7 + 0.3 * math.exp(1 + math.log(0.4 + 0.6 * math.e)))
    shown = [f"r(c) = 0.6·e / Z = {c:.4f}", f"/ Z = {b:.4f}", f"{drafts:.4f}; exact", f"V = {value:.4f}"]
    shown += [f"({drafts:.4f} − {value:.4f}) / λ | {drafts - value:.4f}"]
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.2, 0.6]]).double()
    r = clipped_distribution(p.log(), q.log(), torch.full_like(p, math.log(2))).exp()
    shown += ["r = (" + ", ".join(f"{x:.4g}" for x in r[0].tolist()) + ")"]
    shown += [f"= {float(r.minimum(q).sum()):.4f} instead", f"= {float((r * (r / p).log()).sum()):.4f} nats"]
    for text in shown:
        assert text in page, text

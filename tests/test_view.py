"""The page that shows decoding: its numbers are the decoder's, its text is only text, and it works in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from fsd_bench.board import write_board
from fsd_infer import FuzzyDecoder
from fsd_infer.request.guide import Guide
from fsd_infer.serving.app import Limits, make_app
from fsd_infer.serving.page import PageTrace, answers_page, server_page
from tests.test_guide import decoder as decoder  # a fixture

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)></script><b>&amp;\u2028"
BEAMS = Path(__file__).parent.parent / "benchmarks" / "results" / "beam-sampling-smollm2-135m.json"  # with long names
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.parametrize("drafter", ["head", "lookup", "guide"])
def test_a_trace_says_what_the_target_and_the_statistics_say(decoder: FuzzyDecoder, drafter: str) -> None:
    """Log-probabilities beside a plain forward over the answer; trees whose accepted paths are the emitted tokens."""
    used = decoder.load_drafter("lookup") if drafter == "lookup" else decoder.drafter
    guide = Guide.regex("(a|b) cat sat on the mat (a|b)+") if drafter == "guide" else None
    prompt = decoder.encode("the cat sat on the mat the cat sat on the", chat=False)
    trace = PageTrace(decoder.tokenizer, prompt, used.proposers)
    out = decoder.generate(
        [prompt], rule="tilted:0.05:exact_ngram_size=0:min_p=0", drafter=used, max_new_tokens=40, temperature=0,
        on_round=lambda row, round: trace.add(round), guide=guide,
    )  # fmt: skip
    tokens = [token for round in trace.rounds for token in round["tokens"]]
    answer, record, stats = out.sequences[0], out.records[0], out.stats.rows[0]
    text = "".join(token["text"] for token in tokens)  # without the beginning of a character at the end
    assert text.rstrip("\ufffd") == out.texts[0].rstrip("\ufffd") and len(trace.rounds) == 1 + stats.target_forwards
    with torch.inference_mode():
        logits = decoder.target.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    log_p = logits.float().log_softmax(-1)
    wanted = log_p[torch.arange(len(answer)), torch.tensor(answer)]
    assert [token["lnp"] for token in tokens] == pytest.approx(wanted.tolist(), abs=1e-4)
    ranks = [1 + int((row > value).sum()) for row, value in zip(log_p, wanted)]
    assert [token["rank"] for token in tokens] == ranks
    assert sum(token["nats"] for token in tokens) == pytest.approx(stats.divergence_spent, abs=1e-6)
    assert [token["lossy"] for token in tokens] == [source == 2 for source in record.sources]
    kind = {"head": "head", "lookup": "memory", "guide": "grammar"}[drafter]
    known = {kind, "target", *(["head"] if guide else [])}
    assert {token["source"] for token in tokens} <= known and any(token["source"] == kind for token in tokens)
    for round in trace.rounds[1:]:
        accepted = [node for node in round["nodes"][1:] if node["accepted"]]
        assert len(accepted) >= len(round["tokens"]) - 1
        emitted = [token["lnp"] for token in round["tokens"]][: len(accepted)]
        assert [node["lnp"] for node in accepted][: len(emitted)] == pytest.approx(emitted, abs=1e-5)
        assert all(node["parent"] < place for place, node in enumerate(round["nodes"][1:], start=1))


def test_a_page_runs_its_own_script_and_shows_text_as_text() -> None:
    token = {"text": HOSTILE, "source": "target", "lossy": False}
    page = answers_page({"exact": [{"nodes": [], "tokens": [token]}]})
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy and f"script-src 'sha256-{digest}'" in policy[1] and "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1] and "connect-src 'self'" in server_page("exact")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert "<" not in data and json.loads(data)["answers"][0]["rounds"][0]["tokens"][0]["text"] == HOSTILE
    assert not re.findall(r"(?:src|href)=", page.replace(data, "")) and "innerHTML" not in page
    assert len(page.splitlines()) < 600


# in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: install it from the distribution's packages")
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'fsd-toolkit[browser]'")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, decoder: FuzzyDecoder) -> Iterator[Any]:
    """The page of a server on the loopback; no error in its console is expected."""
    app = make_app(decoder, "tilted", Limits(max_new_tokens=64))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
    opened = browser.new_page(viewport={"width": 390, "height": 800})  # a phone
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/")
    yield opened
    opened.close()
    server.should_exit = server.force_exit = True
    thread.join()
    assert not errors


def test_load_stream_click_compare(page: Any, decoder: FuzzyDecoder) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "the page is wider than a phone"
    page.fill("#prompt", "the cat sat on the mat")
    page.select_option("#rule", "tilted")
    page.fill("#spec", "tilted:0.5:exact_ngram_size=0")
    page.fill("#tokens", "16")
    page.click("#go")
    page.locator("#go:enabled").wait_for()
    answers = page.locator(".answer")
    assert answers.count() == 2 and not page.locator("#message").is_visible()
    for place, rule in enumerate(("exact", "tilted:0.5:exact_ngram_size=0")):
        wanted = decoder.generate("the cat sat on the mat", rule=rule, max_new_tokens=16, temperature=0)
        if rule == "exact":
            assert answers.nth(place).text_content().rstrip("\ufffd") == wanted.texts[0].rstrip("\ufffd")
        assert re.search(r"τ\s*\d", page.locator(".numbers").nth(place).inner_text())
    answers.nth(1).focus()
    page.keyboard.press("ArrowDown")
    assert re.match("Round [12] of tilted", page.locator("#tree-title").inner_text())
    assert page.locator("#tree svg .node").count() > 1 and "rank under the target" in page.inner_text("#facts")
    page.locator(".answer").nth(0).locator(".token").nth(0).click()
    assert "Round 0 of exact" in page.inner_text("#tree-title")
    assert page.locator("#time svg").count() == 2


@pytest.mark.parametrize("width", [390, 1280])
def test_a_board_fits_phones_and_laptops(browser: Any, tmp_path: Path, width: int) -> None:
    rows = write_board([BEAMS], tmp_path / "board.html")
    opened = browser.new_page(viewport={"width": width, "height": 800})
    opened.goto((tmp_path / "board.html").as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.select_option("label:has-text('drafter') select", "none")
    shown = opened.locator("tbody tr").count()
    assert 0 < shown < rows and opened.inner_text("#count").startswith(f"{shown} of ")
    opened.close()

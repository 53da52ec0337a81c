"""Draws docs/figures/frontier.png: every rule on one toy tree, accepted drafts against divergence.

Both are exact expectations over a round at temperature 1, from each rule's law at every node. Run:
``python scripts/draw_frontier.py`` (needs matplotlib).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fsd_infer.rules import Evidence, Verification, parse_rule
from fsd_infer.tree import DraftTree

PARENTS = [0, 0, 0, 1, 1, 2, 3, 4, 6, 8]  # two drafts, three below them, a path of five
VOCAB = 12
COINS = 2000  # rows, each with coins of its own, over which the random gate is averaged
UNIT = [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
PRICES = [20, 10, 6, 4, 3, 2.5, 2, 1.7, 1.4, 1.2, 1, 0.85, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05]
# By rule: the parameter that goes from exact to loose. `fly` is for temperature 0 only.
SWEEPS = {
    "fuzzy": [f"fuzzy:js:{t}" for t in (0, *UNIT)],
    "fuzzy-strict": [f"fuzzy-strict:js:{t}" for t in (0, *UNIT)],
    "random": [f"random:{rate}" for rate in (0, *UNIT)],
    "draft-only": ["draft-only"],
    "lenient": [f"lenient:{x}" for x in reversed(UNIT)],
    "typical": [f"typical:{x}:0.3" for x in (0.9, 0.5, 0.3, 0.2, 0.09, 0.05, 0.02, 0.005)],
    "relaxed": ["relaxed:0", *(f"relaxed:10:{x}" for x in UNIT)],
    "threshold": [f"threshold:{x}:1" for x in (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.005)],
    "cactus": [f"cactus:{x}" for x in (0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)],
    "cascade-token": [f"cascade-token:{x}" for x in (-1, 0, *UNIT[2:])],
    "ensemble": [f"ensemble:{1 - x:g}" for x in (0, *UNIT[:-1])],
}
COLOURS = dict(zip(SWEEPS, plt.get_cmap("tab20").colors[::2] + plt.get_cmap("tab20").colors[1::2]))


def toy_round(rows: int = 1, seed: int = 5) -> Verification:
    """A target's and a drafter's logits on one tree, in equal rows; its children are the drafter's likeliest."""
    generator = torch.Generator().manual_seed(seed)
    count = len(PARENTS)
    p = torch.randn(count, VOCAB, generator=generator) * 2
    q = p + torch.randn(count, VOCAB, generator=generator) * torch.linspace(0.4, 1.6, count)[:, None]
    tokens = [0]
    for node in range(1, count):
        sibling = sum(PARENTS[other] == PARENTS[node] for other in range(1, node))
        tokens.append(int(q[PARENTS[node]].argsort(descending=True)[sibling]))
    inner = sorted(set(PARENTS[1:]))
    q_index = [inner.index(node) if node in inner else -1 for node in range(count)]
    whole = [torch.tensor(values).expand(rows, -1) for values in (tokens, PARENTS, [-0.1 * n for n in range(count)])]
    tree = DraftTree(*whole, q[inner].expand(rows, -1, -1), torch.tensor(q_index).expand(rows, -1))
    logits = p.expand(rows, -1, -1)
    uniforms = torch.rand(rows, count, 3, generator=generator)
    return Verification(tree, logits, logits, greedy=False, uniforms=uniforms)


def point(spec: str) -> tuple[float, float]:
    """(KL(law || p), accepted drafts) of a rule, expected over a round."""
    round = toy_round(COINS if spec.startswith("random") else 1)
    evidence = Evidence(round)
    nats, drafts = expected(round, parse_rule(spec).law(evidence).log_probs(evidence))
    return float(nats.mean()), float(drafts.mean())


def expected(round: Verification, log_r: Tensor) -> tuple[Tensor, Tensor]:
    """The same of laws ln r [B, N, V], [B] each, from the leaves up."""
    log_r, log_p = log_r.double(), round.scores.double().log_softmax(-1)
    r = log_r.exp()
    nats = torch.where(r > 0, r * (log_r - log_p), 0.0).sum(-1)
    drafts = torch.zeros_like(nats)
    tokens, parents = round.tree.tokens[0].tolist(), round.tree.parents[0].tolist()
    for node in range(len(parents) - 1, 0, -1):
        chance = r[:, parents[node], tokens[node]]
        drafts[:, parents[node]] += chance * (1 + drafts[:, node])
        nats[:, parents[node]] += chance * nats[:, node]
    return nats[:, 0], drafts[:, 0]


def random_laws(count: int = 3000) -> tuple[Tensor, Tensor]:
    """Laws that favour drafts at random."""
    round = toy_round(count)
    generator = torch.Generator().manual_seed(0)
    log_r = round.scores.clone()
    lift = torch.randn(count, len(PARENTS), generator=generator) * 2 + 4 * torch.rand(count, 1, generator=generator)
    for node in range(1, len(PARENTS)):
        log_r[:, PARENTS[node], round.tree.tokens[0, node]] += lift[:, node]
    return expected(round, log_r.log_softmax(-1))


def main() -> None:
    figure, ax = plt.subplots(figsize=(9, 6), dpi=150)
    frontier = [point(f"tilted:{price}") for price in ("inf", *PRICES, 0.01)]
    reach = max(x for x, _ in frontier)
    ax.plot(*random_laws(), ".", color="#d5dae0", markersize=3, label="random laws", zorder=1)
    for marker, (name, specs) in zip("ov^DsPX<>ph", SWEEPS.items(), strict=True):
        style = {"marker": marker, "ms": 5, "mfc": "none", "lw": 0.8, "label": name, "zorder": 2}
        ax.plot(*zip(*map(point, specs)), color=COLOURS[name], **style)
    ax.plot(*zip(*frontier), color="black", linewidth=2.2, label="tilted, any price", zorder=3)
    for price in (2.0, 1.0, 0.5, 0.3):
        x, y = point(f"tilted:{price}")
        ax.plot([x], [y], "o", color="black", markersize=5, zorder=4)
        ax.annotate(f"price {price:g}", (x, y), (-8, 6), textcoords="offset points", ha="right", fontsize=9)
    ax.plot(*frontier[0], "s", color="black", markersize=8, zorder=5)
    ax.annotate("exact", frontier[0], (10, -4), textcoords="offset points", fontsize=10)
    x, y = zip(*frontier)
    ax.fill_between([*x, 1.25 * reach], [*y, y[-1]], 1.06 * y[-1], color="#fdf3dd", zorder=0)
    ax.text(0.03 * reach, 1.0 * y[-1], "no law reaches this", fontsize=10, color="#8a6d1d", va="top")
    ax.set_xlim(-0.02 * reach, 1.25 * reach)
    ax.set_ylim(0, 1.06 * y[-1])
    ax.set_xlabel("KL(law ‖ target), nats per round")
    ax.set_ylabel("accepted drafts per round")
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right", fontsize=8.5, framealpha=1)
    figure.tight_layout()
    figure.savefig(Path(__file__).resolve().parent.parent / "docs" / "figures" / "frontier.png")


if __name__ == "__main__":
    main()

"""How well can a small classifier tell important changes from harmless ones: a logistic regression, task by task.

Trained on the labels of all tasks but one and tried on that one; and within each task, on problems that it was not
fitted on. It sees what a judge would see before a round is decided: the target's last hidden state before the token,
the embeddings of the drafted token and of the target's choice, and numbers of the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsd_infer.decoder import FuzzyDecoder

FOLDS = 5
DECAY = 3e-3  # of the weights, on standardised inputs
BATCH = 32
NUMBERS = ("regret", "ln p of the draft", "ln p of the choice", "entropy")


@torch.inference_mode()
def inputs(decoder: FuzzyDecoder, prompts: dict[str, list[int]], rows: Sequence[dict[str, Any]]) -> Tensor:
    """[changes, 3H + numbers] of the changes of these lines, in order.

    prompts: token ids of each line's prompt, by its id.
    """
    target = decoder.target
    changes = [(prompts[row["id"]], change) for row in rows for change in row["changes"]]
    embeddings = target.model.get_input_embeddings().weight
    parts = []
    for start in range(0, len(changes), BATCH):
        batch = changes[start : start + BATCH]
        texts = [torch.tensor([*prompt, *change["before"]]) for prompt, change in batch]
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        features = target.features(ids.to(target.device), mask.to(target.device))[..., : target.hidden_size]
        last = features[torch.arange(len(batch)), lengths - 1]
        log_p = target.lm_logits(last).float().log_softmax(-1)
        draft, choice = (torch.tensor([change[name] for _, change in batch]) for name in ("token", "choice"))
        ln_draft, ln_choice = (log_p.gather(1, token[:, None]) for token in (draft, choice))
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        numbers = [ln_choice - ln_draft, ln_draft, ln_choice, entropy]
        parts.append(torch.cat([last.float(), embeddings[draft].float(), embeddings[choice].float(), *numbers], 1))
    return torch.cat(parts)


def fit(x: Tensor, important: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, scale, weights) of a logistic regression on x [N, F]; the last weight is the bias."""
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-6)
    z = torch.nn.functional.pad((x - mean) / scale, (0, 1), value=1.0)
    weights = torch.zeros(z.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(z @ weights, important)
        value = value + DECAY * weights[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return mean, scale, weights.detach()


def predict(model: tuple[Tensor, Tensor, Tensor], x: Tensor) -> NDArray[np.float64]:
    """[N] log-odds that a change is important."""
    mean, scale, weights = model
    return (torch.nn.functional.pad((x - mean) / scale, (0, 1), value=1.0) @ weights).double().numpy()


def probe(
    decoder: FuzzyDecoder, tasks: dict[str, tuple[dict[str, list[int]], Sequence[dict[str, Any]]]]
) -> dict[str, Any]:
    """By task: ``other_tasks`` and ``same_task``, see :func:`facts`, of classifiers fitted there.

    tasks: by name the prompts, as of :func:`inputs`, and the lines of labels.
    """
    xs = {name: inputs(decoder, prompts, rows) for name, (prompts, rows) in tasks.items()}
    ys = {
        name: torch.tensor([float(change["important"]) for row in rows for change in row["changes"]])
        for name, (_, rows) in tasks.items()
    }
    found: dict[str, Any] = {}
    for name, (_, rows) in tasks.items():
        others = [other for other in tasks if other != name]
        model = fit(torch.cat([xs[other] for other in others]), torch.cat([ys[other] for other in others]))
        fold = torch.tensor([place % FOLDS for place, row in enumerate(rows) for _ in row["changes"]])
        own = np.empty(len(fold))
        for held in range(FOLDS):
            inside = fold == held
            own[inside.numpy()] = predict(fit(xs[name][~inside], ys[name][~inside]), xs[name][inside])
        found[name] = {
            "other_tasks": facts(rows, predict(model, xs[name])),
            "same_task": facts(rows, own),
            "regret": facts(rows, np.array([change["regret"] for row in rows for change in row["changes"]])),
        }
    return found


def facts(
    rows: Sequence[dict[str, Any]], costs: NDArray[np.float64], points: Sequence[float] = (1.0, 2.0)
) -> dict[str, Any]:
    """``auroc`` of costs [changes], and ``harmless_at_points``: what they let through for so many points of score.

    A point of score is lost where one of a hundred answers that were right gets an important change. The share of the
    harmless changes that a threshold accepts, at the largest threshold that loses no more, is what is left of the
    oracle's gain, at most.
    """
    changes = [(change, bool(row["exact"]["score"])) for row in rows for change in row["changes"]]
    important = np.array([change["important"] for change, _ in changes])
    harmful = np.array([change["important"] and solved for change, solved in changes])
    harmless = ~important
    order = np.argsort(costs, kind="stable")
    lost = np.cumsum(harmful[order]) * 100 / len(rows)
    kept = np.cumsum(harmless[order]) / max(1, harmless.sum())
    shares = {f"{most:g}": float(kept[lost <= most].max(initial=0.0)) for most in points}
    return {"auroc": auroc(costs, important), "harmless_at_points": shares}


def auroc(costs: NDArray[np.float64], important: NDArray[np.bool_]) -> float | None:
    """Chance that an important change costs more than a harmless one, equals counting half; None without both kinds."""
    if important.all() or not important.any():
        return None
    gaps = costs[important][:, None] - costs[~important]
    return float((gaps > 0).mean() + 0.5 * (gaps == 0).mean())

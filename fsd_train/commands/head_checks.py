"""Checks of a head with its target on rows of answers, for `fsd-train doctor`: each known way to feed it wrongly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsd_core.errors import DataError
from fsd_core.text.image_rows import has_row_images
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.engine.first_choices import drafts_text
from fsd_infer.rules.verification import TokenOrigin
from fsd_infer.targets.target import Target
from fsd_train import MAX_LENGTH
from fsd_train.commands.feeding import CheckedRow, Feeding, Finding, at_step
from fsd_train.data.features import FeatureStore, sequence_key
from fsd_train.data.row_encoding import check_id, encode_row
from fsd_train.data.serving import differences, prompt_pair
from fsd_train.models.unroll import supervised, unroll
from fsd_train.packed import TextMask

STEPS = 4  # of chains
_CLEAR = 0.05  # smallest difference of agreement that counts
_RENAMED = 6  # fewest drafts in different contexts that show a wrong vocabulary map; fewer agree by chance


class Doctor:
    """Checks of a head with its target on rows of answers.

    Args:
        target: the target.
        head: the head.
        rows: values of rows of answers, as for training.
        max_length: tokens of the longest row to check; rows beyond the target's context are left out in any case.
    """

    checks: tuple[str, ...] = ("positions", "feature layers", "norms", "vocabulary map")  # of how the head is fed
    feeding_kind: type[Feeding] = Feeding

    def __init__(self, target: Target, head: Any, rows: Sequence[dict[str, Any]], max_length: int = MAX_LENGTH) -> None:
        self.target, self.head = target, head.to(target.device)
        self.max_length = min(max_length, target.fixed_positions or max_length)
        count = int(target.config.num_hidden_layers)
        layers = {n + d for n in head.config.fused_layers for d in (-1, 0, 1)} | {count - 1}
        target.capture_layers([number for number in sorted(layers) if 0 <= number < count])
        self.rows: list[CheckedRow] = []
        self.feeding = self.feeding_kind(target, self.head, self.rows)
        for index, values in enumerate(rows, start=1):
            for ids, mask in encode_row(values, target.tokenizer, f"row {index}"):
                loss_mask = torch.tensor([mask])
                if len(ids) <= self.max_length and bool(supervised(loss_mask[0], 1).any()):
                    check_id(max(ids), f"row {index}", target.vocab_size)
                    tokens = torch.tensor([ids], device=target.device)
                    self.rows.append(CheckedRow(values, tokens, loss_mask.to(target.device), target.features(tokens)))
        if not self.rows:
            raise DataError(
                f"no row of up to {self.max_length} tokens has an answer of two or more. Give rows of answers, as for "
                "training, or raise --max-length."
            )

    # checks ------------------------------------------------------------------------------------------------------

    def check_rows(self) -> list[Finding]:
        """Check that the prompts have the chat template of decoding and that the mask covers the answers."""
        tokenizer, eos = self.target.tokenizer, set(self.target.eos_token_ids)
        pairs = [prompt_pair(row.values, tokenizer) for row in self.rows]
        prompts = [pair for pair in pairs if pair is not None]  # ids of the row, and those of decoding
        differing = [pair for pair in prompts if pair[0] != pair[1]]
        if differing:
            theirs, ours = map(self._text, differing[0])
            says = f"{len(differing)} of {len(prompts)} prompts differ in ids from decoding: {theirs!r}, here {ours!r}"
            fix = "regenerate the answers with this target's tokenizer and template (fsd-train regenerate)"
            template = Finding("template", False, says, fix)
        elif prompts:
            template = Finding("template", True, f"{len(prompts)} prompts have the ids of decoding")
        else:
            template = Finding("template", None, "no row has its prompt both as messages and as ids")
        warnings = [text for text in differences([row.values for row in self.rows], tokenizer) if "arguments" in text]
        template = template if not warnings or template.ok is False else Finding("template", None, " ".join(warnings))
        masked = sum(int(row.mask.sum()) for row in self.rows)
        ended = sum(int(row.ids[0][row.mask[0].bool()][-1]) in eos for row in self.rows)
        share = masked / sum(row.ids.shape[1] for row in self.rows)
        says = f"{masked} tokens, {share:.0%} of all; {ended} of {len(self.rows)} answers end with an end token"
        return [template, Finding("loss mask", True if ended else None, says)]

    def _text(self, ids: Sequence[int]) -> str:
        text = str(self.target.tokenizer.decode(list(ids)))
        return text if len(text) <= 40 else f"{text[:40]}…"

    def check_feeding(self) -> list[Finding]:
        """Check whether another way to feed or read the head agrees clearly better."""
        own = {step: self.feeding.agreement(at_step(step)) for step in (0, 1)}
        worst: dict[str, tuple[float, Finding]] = {}
        for variant in self.feeding.variants():
            other = self.feeding.agreement(variant)
            agreement = own[variant.step]
            error = math.sqrt(2 * max(other * (1 - other), 1e-4) / self.feeding.positions())
            if other - agreement > max(_CLEAR, 3 * error) and agreement < variant.below * other:
                says = f"agrees with the target in {agreement:.0%} of the drafts, with {variant.what} in {other:.0%}"
                finding = Finding(variant.check, False, says, variant.fix)
                if variant.check not in worst or other > worst[variant.check][0]:
                    worst[variant.check] = other, finding
        remap = self._remapped()
        if remap is not None:
            worst["vocabulary map"] = remap
        best = max(worst.values(), key=lambda pair: pair[0], default=None)  # one fault explains the others
        findings = [Finding(check, True, "no variant agrees better") for check in self.checks]
        if best is not None:
            findings[self.checks.index(best[1].check)] = best[1]
        says = f"{own[0]:.1%} of first drafts are the target's most likely token, {own[1]:.1%} of second ones"
        findings.append(Finding("agreement", own[0] > 0.1 or None, f"{says} ({self.feeding.positions()} positions)"))
        return [*findings, self._coverage()]

    def _remapped(self) -> tuple[float, Finding] | None:
        """Check for wrong ids in the vocabulary map: name each entry by the id that the target mostly wants at other
        positions where the head drafts it. Only positions after another token are evidence, since what the last token
        decides, or one answer repeats, goes together under any map.
        """
        before, (drafted, expected) = self.feeding.previous_tokens(), self.feeding.drafted()
        own = self.feeding.ids(drafted) == expected
        renamed = _is_one_to_one(drafted, expected, lambda *what: _count_equal(*what) - 1)
        proven = _is_one_to_one(drafted, expected, lambda *what: _count_equal(*what) - _count_equal(before, *what))
        proven &= ~own
        contexts = torch.stack([before, drafted, expected])[:, proven].unique(dim=1).shape[1]
        other, mine = float(renamed.float().mean()), float(own.float().mean())
        if contexts < _RENAMED or other - mine <= _CLEAR or mine >= 0.7 * other:
            return None
        says = f"agrees with the target in {mine:.0%} of the drafts, under other ids in {other:.0%}"
        fix = "d2t or draft_ids are in another order than the LM head's rows: write the map of the training"
        return other, Finding("vocabulary map", False, says, fix)

    def _coverage(self) -> Finding:
        if self.head.draft_ids is None:
            return Finding("coverage", True, "the draft vocabulary is the whole vocabulary")
        drafted = torch.zeros(self.target.vocab_size, dtype=torch.bool, device=self.target.device)
        drafted[self.head.draft_ids] = True
        answers = torch.cat([row.ids[0][row.mask[0].bool()] for row in self.rows])
        share = float(drafted[answers].float().mean())
        says = f"the draft vocabulary holds {share:.1%} of the answers' tokens"
        if share >= 0.9:
            return Finding("coverage", True, says)
        return Finding("coverage", False, says, "choose it from such answers (draft_vocab_size, --data)")

    def check_dtype(self, dtype: torch.dtype) -> Finding:
        """Check that the head stays finite and keeps its drafts in the data type of decoding."""
        name = str(dtype).removeprefix("torch.")
        head = copy.deepcopy(self.head).cast(dtype)
        feeding, row = self.feeding_kind(self.target, head, self.rows), self.rows[0]
        inputs = feeding.inputs(row.features)[:, :-1].to(dtype)
        embeds = head.embed(row.ids[:, 1:], self.target).to(dtype)
        with torch.no_grad():
            text = TextMask((embeds.shape[1],), embeds.device)
            (outputs,) = unroll(head, embeds, inputs, text, 1, torch.arange(0))
            if not all(bool(tensor.isfinite().all()) for tensor in (inputs, outputs, head.readout(outputs))):
                return Finding("dtype", False, f"overflows in {name}", "run it in bfloat16 (or float32)")
        same = float((self.feeding.drafted()[0] == feeding.drafted(dtype=dtype)[0]).float().mean())
        says = f"in {name} {same:.1%} of the first drafts equal those of float32"
        return Finding("dtype", same > 0.9, says, "run it in float32")

    def check_positions(self) -> Finding:
        """Compare rotary base and longest context with the target's."""
        layer, config = self.head.config.layer, self.target.config
        ours = (layer.get("rope_parameters") or {}).get("rope_theta")
        theirs = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
        longest, room = layer.get("max_position_embeddings"), self.target.max_positions
        says = f"base {ours} (target {theirs}), up to {longest} tokens (target {room})"
        if ours == theirs:
            return Finding("rope", True, says)
        fix = "set the head's rope_theta to the target's, unless it was trained with its own"
        return Finding("rope", None, says, fix)

    def check_cache(self, directory: str | Path) -> Finding:
        """Compare cached features with the target's current ones."""
        store = FeatureStore(directory)
        rows = [row for row in self.rows if sequence_key(row.ids[0].cpu()) in store]
        if not rows:
            return Finding("cached features", None, f"{directory} has none of these rows")
        self.target.capture_layers(store.layers)
        cached = torch.cat([store.get(sequence_key(row.ids[0].cpu())).float() for row in rows])
        computed = torch.cat([self.target.features(row.ids)[0] for row in rows]).float().cpu()
        gap = float((computed - cached).norm() / cached.norm()) if computed.shape == cached.shape else math.inf
        says = f"differ by {gap:.1%} from the target's"
        fix = "cache them again with this target, in its precision"
        return Finding("cached features", gap < 0.05, says, fix)

    def drafter(self, shape: TreeShape) -> EagleDrafter:
        """Return a drafter of the head's chains."""
        return EagleDrafter(self.head, self.target, shape, context_ids=False)

    def decoded(self, prompts: int, tokens: int) -> tuple[list[Finding], list[float], list[list[int]]]:
        """Decode prompts greedily with a chain of drafts.

        Returns:
            (findings, acceptance by position, answers)
        """
        prompt_ids = [row.prompt() for row in self.rows[:prompts]]
        drafter = self.drafter(TreeShape(STEPS, 1, STEPS + 1))
        output = FuzzyDecoder(self.target, drafter).generate(prompt_ids, max_new_tokens=tokens, temperature=0)
        accepted = accepted_shares([run for record in output.records for run in runs_of(record.sources)], STEPS)
        says = "accepted by position: " + " ".join(f"{share:.0%}" for share in accepted)
        mistakes = Finding("drafts", None, drafts_text(output.stats.drafts.summary()))
        return [Finding("decoding", None, says), mistakes], accepted, output.sequences


def refuse_images(values: Mapping[str, Any]) -> None:
    """Raise DataError for a row with images, since no check here reads pixels."""
    if has_row_images(values):
        raise DataError(
            "the row has images, and doctor feeds a head text alone, which shows the same faults. Give rows without "
            "images; how drafts fare after images, the callback DecodedTau measures in training."
        )


def _count_equal(*what: torch.Tensor) -> torch.Tensor:
    """Return for each position [N] the number of positions with the same values of all ``what`` [N]."""
    _, places, counts = torch.stack(what).unique(dim=1, return_inverse=True, return_counts=True)
    return counts[places]


def _is_one_to_one(drafted: torch.Tensor, expected: torch.Tensor, others: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return where [N] most ``others`` with this draft want this id, and the reverse: one-to-one, as a map is."""
    pairs = others(drafted, expected)
    return (pairs > 0.5 * others(drafted)) & (pairs > 0.5 * others(expected))


def runs_of(sources: Sequence[int]) -> list[int]:
    """Return the accepted drafts per round of one answer, from the sources of its tokens.

    The first token is the prefill's. A round cut by the end of the answer is omitted.
    """
    runs, run = [], 0
    for source in sources[1:]:
        run += 1
        if source == TokenOrigin.TARGET:
            runs.append(run - 1)
            run = 0
    return runs


def accepted_shares(runs: Sequence[int], drafted: int) -> list[float]:
    """Return the shares of rounds that accepted draft 1, 2, … of ``drafted``, from :func:`runs_of`."""
    return [sum(run > index for run in runs) / max(len(runs), 1) for index in range(drafted)]

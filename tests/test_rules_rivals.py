"""The published rules beside ours: their laws and bounds in closed form, where they are exact, and what they refuse.

Laws are compared at every node of toy rounds with formulas in numpy that are written from the papers and share no code
with the package; that tokens are drawn from laws, and what they cost, is tested in ``test_rules_laws.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from scipy.stats import norm

from fsd_infer import FsdError, FuzzyDecoder, LMDrafter, Target
from fsd_infer.rules import Exact, Fly, Rule, Verification, apply_rules, parse_rule
from fsd_infer.rules.contexts import Contexts, Evidence
from fsd_infer.tree import DraftTree
from tests.families import noisy_model, tiny_model, tiny_prompts
from tests.rules_toy import Enumeration, Toy, V, simulate
from tests.test_rules_chain import chain_round
from tests.test_rules_laws import ALARM, p_value
from tests.tree_rounds import assert_same, inner_of, tree_round, verdict_of

# References take p, q and the children, or None where a draft was sampled from q, and return the law.


def _residual(p: np.ndarray, q: np.ndarray, kept: np.ndarray) -> np.ndarray:
    left = np.clip(p - q, 0, None)
    return kept + (1 - kept.sum()) * left / left.sum()


def _children_at(p: np.ndarray, children: list[int], chance: float) -> np.ndarray:
    law = p * (1 - chance) / max(1 - p[children].sum(), 1e-300)
    law[children] = p[children] * chance / p[children].sum()
    return law


def lenient(p, q, children, lenience):  # type: ignore[no-untyped-def]
    if children is None:
        return _residual(p, q, np.minimum(q, p / lenience))
    return _children_at(p, children, min(1.0, p[children].sum() / lenience))


def threshold(p, q, children, single, acc):  # type: ignore[no-untyped-def]
    if children is None:
        return _residual(p, q, np.where((p >= single) & (p > 0), q, np.minimum(q, p / acc)))
    passing = [child for child in children if p[child] >= single]
    return _children_at(p, passing, 1.0) if passing else lenient(p, q, children, acc)


def passing(p, q, children, passes):  # type: ignore[no-untyped-def]
    if children is None:
        return _residual(p, q, np.where(passes(p) & (p > 0), q, np.minimum(p, q)))
    chosen = [child for child in children if passes(p)[child] and p[child] > 0]
    return _children_at(p, chosen, 1.0) if chosen else p


def plausible(p: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    return p >= min(epsilon, delta * math.exp(rel_entr(p, 1).sum()))


def near_the_best(p: np.ndarray, k: int, cutoff: Callable[[float], float]) -> np.ndarray:
    return (p >= np.sort(p)[-k] - 1e-9) & (p >= cutoff(p.max()) - 1e-9)


def cactus(p, q, children, delta):  # type: ignore[no-untyped-def]
    if children is not None:
        mass = p[children].sum()
        return _children_at(p, children, min(1.0, mass + math.sqrt(2 * delta * mass * max(0, 1 - mass))))
    law = np.zeros(len(p))
    for x in range(len(p)):  # over all drafts
        h = p * 0.0
        h[x] = min(1.0, p[x] + math.sqrt(2 * delta * p[x] * (1 - p[x])))
        others = np.arange(len(p)) != x
        h[others] = p[others] * (1 - h[x]) / (1 - p[x])
        accepted = min(1.0, h[x] / q[x]) if q[x] > 0 else 0.0
        law[x] += q[x] * accepted
        if accepted < 1 and q[x] > 0:
            left = np.clip(h - q, 0, None)
            law += q[x] * (1 - accepted) * left / left.sum()
    return law


def cascade(p, q, children, alpha):  # type: ignore[no-untyped-def]
    trusted = p >= (1 - alpha) * p.max()
    return np.where(trusted, q, 0) + (1 - q[trusted].sum()) * p


def ensemble(p, q, children, weight):  # type: ignore[no-untyped-def]
    return weight * p + (1 - weight) * q


REFERENCES: dict[str, partial[np.ndarray]] = {
    "lenient:0.5": partial(lenient, lenience=0.5),
    "lenient:0.9": partial(lenient, lenience=0.9),
    "threshold:0.4:0.8": partial(threshold, single=0.4, acc=0.8),
    "threshold:acc=0.6": partial(threshold, single=1.1, acc=0.6),
    "typical": partial(passing, passes=partial(plausible, epsilon=0.09, delta=0.3)),
    "typical:0.4:0.9": partial(passing, passes=partial(plausible, epsilon=0.4, delta=0.9)),
    "relaxed:2:0.2": partial(passing, passes=partial(near_the_best, k=2, cutoff=lambda best: best - 0.2)),
    "relaxed:3:0.5:true": partial(passing, passes=partial(near_the_best, k=3, cutoff=lambda best: best / 2)),
    "cactus:0.02": partial(cactus, delta=0.02),
    "cactus:0.5": partial(cactus, delta=0.5),
    "cascade-token:0.3": partial(cascade, alpha=0.3),
    "cascade-token:1": partial(cascade, alpha=1.0),
    "ensemble:0.7": partial(ensemble, weight=0.7),
    "fuzzy:js:inf:floor=0.3": partial(passing, passes=lambda p: p >= 0.3 * p.max()),
    "fuzzy-strict:js:inf:floor=0.3": partial(cascade, alpha=0.7),
}
TOYS = {
    "tree": Toy.make(1),
    "tree-processed": Toy.make(2, processed=True),
    "tree-reduced": Toy.make(3, reduced=True),
    "chain": Toy.make(5, sampled=True),
    "chain-processed": Toy.make(6, sampled=True, processed=True),
    "chain-reduced": Toy.make(7, sampled=True, reduced=True),
}


def contexts_of(round: Verification) -> Contexts:
    return Evidence(round, at_once=False).all_nodes_of(torch.arange(round.tree.tokens.shape[0]))


def inner_contexts(toy: Toy, greedy: bool = False):  # type: ignore[no-untyped-def]
    """A round with roots at 64 contexts, and (index, p, q, children) of each of its inner nodes."""
    generator = torch.Generator().manual_seed(3)
    roots = torch.randint(0, 85, (64,), generator=generator)
    tree, where = toy.draft(roots, generator)
    round = toy.round(roots, torch.Generator().manual_seed(3), greedy=greedy)
    if not toy.sampled:
        assert torch.equal(tree.tokens, round.tree.tokens)
    p = softmax((toy.p if greedy else toy.scores(toy.p)).double().numpy(), axis=-1)
    q = softmax((toy.full_q() if greedy else toy.scores(toy.full_q())).double().numpy(), axis=-1)
    found = []
    for row, root in enumerate(roots.tolist()):
        contexts = [root]
        for node in range(1, len(toy.parents)):
            contexts.append(V * contexts[toy.parents[node]] + 1 + int(round.tree.tokens[row, node]))
        for node, context in enumerate(contexts):
            children = [int(round.tree.tokens[row, c]) for c in range(1, len(contexts)) if toy.parents[c] == node]
            if children:
                found.append((row * len(contexts) + node, p[context], q[context], children))
    return round, found


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("spec", REFERENCES)
def test_law(spec: str, toy: str) -> None:
    round, inner = inner_contexts(TOYS[toy])
    at = contexts_of(round)
    laws = parse_rule(spec).law(at).log_probs(at).exp().double().numpy()
    changed = 0
    for index, p, q, children in inner:
        wanted = REFERENCES[spec](p, q, None if TOYS[toy].sampled else children)
        assert wanted.sum() == pytest.approx(1.0, abs=1e-9)
        np.testing.assert_allclose(laws[index], wanted, atol=2e-6)
        changed += not np.allclose(wanted, p, atol=1e-3)
    assert changed


@pytest.mark.parametrize("spec", REFERENCES)
def test_temperature_zero_emits_the_likeliest_token_of_the_law(spec: str) -> None:
    for toy in (TOYS["tree"], TOYS["tree-reduced"]):
        round, inner = inner_contexts(toy, greedy=True)
        verdict = parse_rule(spec)(round)
        changed = 0
        for index, p, q, children in inner:
            row, node = divmod(index, len(toy.parents))
            if REFERENCES[spec].func is cascade:  # one-hot p and q
                trusted = p[q.argmax()] >= (1 - REFERENCES[spec].keywords["alpha"]) * p.max()
                choice = (q if trusted else p).argmax()
            else:
                choice = REFERENCES[spec](p, q, children).argmax()
            if node == 0:
                assert verdict.tokens[row, 0] == choice
                changed += choice != p.argmax()
        assert changed or spec == "lenient:0.9" or spec == "cactus:0.02"


def test_bounds_of_the_sources() -> None:
    for toy in TOYS.values():
        for _, p, q, children in inner_contexts(toy)[1]:
            drafts = None if toy.sampled else children
            assert (lenient(p, q, drafts, 0.5) <= p / 0.5 + 1e-9).all()  # Leviathan et al.
            mixed = ensemble(p, q, drafts, 0.7)
            assert np.abs(mixed - p).sum() == pytest.approx(0.3 * np.abs(q - p).sum())
            trusting = cascade(p, q, drafts, 0.3)
            assert (trusting[p < 0.7 * p.max()] <= p[p < 0.7 * p.max()] + 1e-12).all()
            if not toy.sampled:
                assert rel_entr(cactus(p, q, drafts, 0.1), p).sum() <= math.log(1 + 2 * 0.1) + 1e-9


@pytest.mark.parametrize(
    ("spec", "toy"),
    [("threshold:0.4:0.8", "tree"), ("cascade-token:0.3", "tree"), ("lenient:0.5", "chain"), ("cactus:0.5", "chain")],
)
def test_sequences_and_what_they_cost(spec: str, toy: str) -> None:
    wanted = Enumeration(TOYS[toy], REFERENCES[spec])
    got = simulate(TOYS[toy], parse_rule(spec), 5000, seed=11)
    assert p_value(got.codes, wanted.sequence_law()) > ALARM
    assert p_value(got.codes, wanted.target_law()) < ALARM
    error = got.spent.std() / math.sqrt(5000)
    assert abs(got.spent.mean() - wanted.expected_spent) <= norm.isf(ALARM / 2) * error


EXACT_AT = [
    "exact:block=true",
    "lenient:1",
    "threshold",
    "typical:inf:inf",
    "relaxed:0",
    "cactus:0",
    "cascade-token:-0.1",
    "ensemble:1",
    "fly:entropy=inf",
]


@pytest.mark.parametrize("spec", EXACT_AT)
def test_exact_token_for_token_at_the_setting_that_its_help_names(spec: str) -> None:
    rule = parse_rule(spec)
    assert rule.name == "exact" or "Exact at" in " ".join((rule.__doc__ or "").split())
    for seed in range(4):
        for greedy in (True, False):
            rounds = [tree_round(seed, greedy=greedy, mask=seed % 2 == 0)]
            if "block" not in spec or greedy:
                rounds.append(chain_round(seed, greedy=greedy, mask=seed % 2 == 0))
            for round in rounds:
                if greedy or not isinstance(rule, Fly):
                    assert_same(rule(round), Exact()(round))
    if spec == "relaxed:0":  # and at temperature 0 where no other token can pass
        for other in ("relaxed:1:1", "relaxed:10:0"):
            round = tree_round(5, greedy=True)
            assert torch.equal(parse_rule(other)(round).tokens, Exact()(round).tokens)


@pytest.mark.parametrize("spec", [*REFERENCES, "exact:block=true"])
def test_all_nodes_at_once_are_the_same(spec: str) -> None:
    rule = parse_rule(spec)
    for seed in range(3):
        for round in (tree_round(seed, reduced=seed == 1), tree_round(seed, greedy=True), chain_round(seed)):
            assert_same(verdict_of(rule, round, True), verdict_of(rule, round, False))


@pytest.mark.parametrize("spec", ["lenient:0.3", "threshold:0.2:0.5", "cactus:1", "cascade-token:0.9", "typical:0:0"])
def test_budgets_hold_and_forbidden_tokens_stay_forbidden(spec: str) -> None:
    rule = parse_rule(f"{spec}:budget=0.4")
    spent = 0.0
    for seed in range(4):
        for round in (
            tree_round(seed, mask=True),
            tree_round(seed, mask=True, greedy=True),
            chain_round(seed, mask=True),
        ):
            verdict = rule(round)
            assert (verdict.spent.double().sum(-1) <= 0.4 + 1e-6).all()
            spent += float(verdict.spent.sum())
            for row in range(round.tree.tokens.shape[0]):
                for step in range(int(verdict.accepted[row]) + 1):
                    node = int(verdict.path[row, step])
                    assert round.scores[row, node, verdict.tokens[row, step]] > -math.inf
    assert spent > 0


# fly --------------------------------------------------------------------------------------------------------------


def fly_reference(round: Verification, row: int, window: int, entropy: float) -> list[int]:
    """The tokens that FLy emits, by recursion."""
    tokens, parents = round.tree.tokens[row].tolist(), round.tree.parents[row].tolist()
    p = softmax(round.scores[row].double().numpy(), axis=-1)
    below = {node: [c for c in range(1, len(parents)) if parents[c] == node] for node in range(len(parents))}

    def agreeing(node: int) -> int:
        return max((1 + agreeing(c) for c in below[node] if tokens[c] == p[node].argmax()), default=0)

    node, emitted = 0, []
    while True:
        choice = int(p[node].argmax())
        best = np.sort(p[node])[-3:]
        if choice not in [tokens[c] for c in below[node]] and -(best * np.log(best)).sum() >= entropy:
            deferred = [c for c in below[node] if agreeing(c) >= window - 1]
            if deferred:
                choice = tokens[max(deferred, key=lambda c: p[node][tokens[c]])]
        emitted.append(choice)
        down = [c for c in below[node] if tokens[c] == choice]
        if not down:
            return emitted
        node = down[0]


def test_fly_lets_a_mismatch_through_where_the_target_agrees_with_what_follows() -> None:
    let_through = 0
    for seed, window in itertools.product(range(30), (1, 2, 3)):
        round = tree_round(seed, nodes=12, greedy=True)
        verdict = Fly(window, 0.8)(round)
        exact = Exact()(round)
        for row in range(round.tree.tokens.shape[0]):
            wanted = fly_reference(round, row, window, 0.8)
            assert verdict.tokens[row, : int(verdict.accepted[row]) + 1].tolist() == wanted
            let_through += window > 1 and int(verdict.accepted[row]) > int(exact.accepted[row])
            assert len(inner_of(round, row))
    assert let_through > 5


def test_fly_is_refused_above_temperature_zero() -> None:
    with pytest.raises(FsdError, match="rule 'fly'.*needs temperature 0"):
        Fly()(tree_round(0))


# block verification -----------------------------------------------------------------------------------------------


def every_draft(toy: Toy, length: int) -> tuple[Verification, np.ndarray, np.ndarray]:
    """A round with a row per possible draft of ``length`` tokens; contexts [rows, length + 1]; each draft's chance."""
    drafts = torch.tensor(list(itertools.product(range(V), repeat=length)))
    where = [torch.zeros(len(drafts), dtype=torch.long)]
    for i in range(length):
        where.append(V * where[-1] + 1 + drafts[:, i])
    contexts = torch.stack(where, 1)
    q_scores = toy.scores(toy.full_q())[contexts[:, :-1]]
    chance = q_scores.double().softmax(-1).gather(-1, drafts[..., None]).squeeze(-1).prod(-1)
    contexts, q_scores, drafts = (values[chance > 0] for values in (contexts, q_scores, drafts))
    tree = DraftTree.chain(torch.nn.functional.pad(drafts, (1, 0)), q_scores, q_scores=q_scores)
    logits = toy.scores(toy.p)[contexts]
    uniforms = torch.rand(len(drafts), length + 1, 3)
    return Verification(tree, logits, logits, False, uniforms), contexts.numpy(), chance[chance > 0].numpy()


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("toy", ["chain", "chain-processed", "chain-reduced"])
def test_block_verification_has_the_targets_law_and_accepts_more(toy: str, length: int) -> None:
    """Over all drafts: the law of length + 1 tokens is the target's to rounding, and more drafts are accepted."""
    models = TOYS[toy]
    round, contexts, weight = every_draft(models, length)
    rows = len(weight)
    at = contexts_of(round)
    acceptance = Exact(block=True).law(at).closed_acceptance
    assert acceptance is not None
    chance = acceptance.chance.double().view(rows, -1).numpy()
    rest = acceptance.rest.double().view(rows, length + 1, V).numpy()
    p = softmax(models.scores(models.p).double().numpy(), axis=-1)

    def continued(context: int, steps: int) -> np.ndarray:
        """[V**steps] the target's law from there on."""
        if steps == 0:
            return np.ones(1)
        return np.concatenate([p[context, y] * continued(V * context + 1 + y, steps - 1) for y in range(V)])

    law = np.zeros(V ** (length + 1))
    accepted = 0.0
    for row in range(rows):
        code, here = 0, weight[row]
        for i in range(length + 1):
            context = contexts[row, i]
            left = p[context] if i == length else rest[row, i] / rest[row, i].sum()
            stops = here * (1.0 if i == length else 1 - chance[row, i])
            span = V ** (length - i)
            for y in range(V):
                start = (code * V + y) * span
                law[start : start + span] += stops * left[y] * continued(V * context + 1 + y, length - i)
            if i < length:
                here *= chance[row, i]
                accepted += here
                code = code * V + int(round.tree.tokens[row, i + 1])
    np.testing.assert_allclose(law, continued(0, length + 1), atol=1e-6)
    by_token = softmax(models.scores(models.full_q()).double().numpy(), axis=-1)
    one_by_one = 0.0
    prefixes = {(): 1.0}
    for _ in range(length):
        prefixes = {
            (*text, x): reach * min(p[context_of(text), x], by_token[context_of(text), x])
            for text, reach in prefixes.items()
            for x in range(V)
        }
        one_by_one += sum(prefixes.values())
    assert accepted >= one_by_one - 1e-6
    if length > 1:
        assert accepted > one_by_one + 0.005
    else:
        assert accepted == pytest.approx(one_by_one, abs=1e-6)


def context_of(text: tuple[int, ...]) -> int:
    context = 0
    for token in text:
        context = V * context + 1 + token
    return context


def test_block_verification_walks_by_its_tests() -> None:
    """The mean accepted length of the walk over many rounds is the expected one, and above that token by token."""
    generator = torch.Generator().manual_seed(8)
    toy = Toy.make(5, sampled=True)
    round = toy.round(torch.zeros(3000, dtype=torch.long), generator)
    block, plain = Exact(block=True)(round), Exact()(round)
    at = contexts_of(round)
    acceptance = Exact(block=True).law(at).closed_acceptance
    assert acceptance is not None
    wanted = acceptance.chance.view(3000, -1)[:, :-1].cumprod(-1).sum(-1).mean().item()
    assert block.accepted.double().mean().item() == pytest.approx(wanted, abs=5 * 0.9 / math.sqrt(3000))
    assert wanted > plain.accepted.double().mean().item()
    assert not block.gate_open.any()


# parameters and batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lenient", "lenience is missing"),
        ("lenient:0", "lenience must be above 0 and at most 1, not 0.0"),
        ("lenient:1.5", "lenience must be"),
        ("threshold:2", "single must be between 0 and 1, not 2"),
        ("threshold:acc=0", "acc must be"),
        ("typical:-1", "epsilon must be at least 0"),
        ("relaxed:0.5", "k must be a whole number"),
        ("relaxed:3:2", "delta must be between 0 and 1"),
        ("relaxed:3:0.2:maybe", "relative must be true or false"),
        ("cactus:-0.1", "delta must be between 0 and 1e.06"),
        ("cactus:inf", "delta must be between 0 and 1e.06, not inf"),
        ("cascade-token:1.1", "alpha must be at most 1"),
        ("ensemble:0", "weight must be"),
        ("fly:0", "window must be between 1 and 1024"),
        ("fly:6:-1", "entropy must be at least 0"),
        ("exact:block=2", "block must be true or false"),
    ],
)
def test_bad_parameters_are_named(spec: str, message: str) -> None:
    with pytest.raises(FsdError, match=message):
        parse_rule(spec)


def test_rows_of_a_batch_have_rules_of_their_own() -> None:
    specs = ["exact", "lenient:0.3", "cascade-token", "tilted:0.5", "typical", "ensemble:0.4"]
    rules: list[Rule] = [parse_rule(spec) for spec in specs]
    for round in (tree_round(2), tree_round(2, greedy=True)):
        together = apply_rules(rules, round)
        for row, rule in enumerate(rules):
            assert together.tokens[row].tolist() == rule(round).tokens[row].tolist()
            assert together.accepted[row] == rule(round).accepted[row]


def test_prompts_of_one_request_have_rules_of_their_own() -> None:
    target = Target(tiny_model("llama"))
    decoder = FuzzyDecoder(target, LMDrafter(Target(noisy_model("llama")), target, depth=4))
    prompts = tiny_prompts()
    specs = ["exact", "draft-only", "lenient:0.05", "typical:0.001:0.01"]
    options = dict(max_new_tokens=16, do_sample=False)
    together = decoder.generate(prompts, rule=specs, **options)
    alone = [decoder.generate([prompt], rule=spec, **options) for prompt, spec in zip(prompts, specs)]
    assert together.sequences == [one.sequences[0] for one in alone]
    assert together.sequences[1:] != decoder.generate(prompts[1:], **options).sequences  # the rules matter
    for batch in (specs[:2], []):
        with pytest.raises(FsdError, match="one rule, or one per prompt|one per prompt"):
            decoder.generate(prompts, rule=batch, **options)

"""The model class ``fsd`` of lm-evaluation-harness: speculative decoding under any rule."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from fsd_bench.likelihood import log_likelihoods
from fsd_bench.lm_eval.texts import Until, cut, with_turns
from fsd_core.errors import ContextLengthError, DataError, FsdError
from fsd_core.registry import MAX_SEED, read_float, read_int
from fsd_core.text.conversations import check_messages
from fsd_core.text.templates import turns_for
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.engine.stats import RowStats
from fsd_infer.request.options import at_temperature
from fsd_infer.rules import parse_rule
from fsd_infer.targets.placing import parse_device, parse_dtype

NEW_TOKENS = 256  # the harness's default
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
HARNESS_DEVICE = "cuda:0"  # the harness's default


class FsdLM(TemplateLM):
    """A target, a drafter and a rule, as ``--model_args target=…,drafter=…,rule=…``.

    The rule generates answers; log-likelihoods are the target's. The harness's results hold statistics of the answers
    under ``config``: ``fsd``.

    Args:
        target: as on the command line of ``fsd-infer``.
        drafter: as on the command line of ``fsd-infer``.
        rule: as text, "tilted:2" or "fuzzy:js:0.3:budget=4".
        dtype: as on the command line of ``fsd-infer``.
        device: as on the command line of ``fsd-infer``.
        tree: as on the command line of ``fsd-infer``, but written 8x2x16, since the harness splits at commas.
        seed: seed of the draws, plus the batch's number.
        batch_size: prompts decoded together.
        max_batch_size: ignored.

    Raises:
        FsdError: a target, drafter or option that cannot be used.
    """

    def __init__(
        self,
        target: str = "smollm2-135m",
        drafter: str | None = None,
        rule: str = "exact",
        dtype: str = "bf16",
        device: str | None = None,
        tree: str | None = None,
        seed: int | str = 0,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.rule = parse_rule(rule)
        self.batch_size, self.seed = _count("batch_size", batch_size or 1), _count("seed", seed, least=0)
        if device == HARNESS_DEVICE and not torch.cuda.is_available():
            device = None
        self.decoder = FuzzyDecoder.from_pretrained(
            target, drafter, dtype=parse_dtype(dtype), device=parse_device(device), tree=tree
        )
        self.tokenizer = self.decoder.tokenizer
        if self.tokenizer is None:
            raise FsdError(f"target {target} has no tokenizer, but tasks are text: add its tokenizer files.")
        self.rows: list[RowStats] = []  # of all answers
        self.seconds = 0.0
        self.cut_prompts = 0  # prompts and contexts that were too long
        self._templated = False
        self._batches = 0

    # text ----------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self.tokenizer.eos_token_id is None else int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the tokenizer's BOS, else its EOS. Raises FsdError if none."""
        named = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        prefix = next((token for token in named if token is not None), None)
        if prefix is None:
            raise FsdError("the tokenizer names no BOS and no EOS token, so an empty context cannot be encoded.")
        return int(prefix)

    @property
    def tokenizer_name(self) -> str:
        return str(self.decoder.target.name).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as text; without a generation prompt the last message stays open.

        Raises DataError: the template refuses the messages.
        """
        self._templated = True
        try:
            text = self.tokenizer.apply_chat_template(
                turns_for(self.tokenizer, check_messages(with_turns(chat_history))),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template is a program of the model's author
            raise DataError(f"the chat template refuses a task's messages: {error}") from error
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode text, with the tokenizer's special tokens unless a chat template or the text has BOS already."""
        bos = self.tokenizer.bos_token
        has_bos = self._templated or bool(bos) and string.startswith(bos)
        special = not has_bos if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

    # log-likelihoods -----------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return per pair of texts the continuation's log-likelihood, and whether greedy decoding would give it.

        Raises ContextLengthError: a continuation longer than the context.
        """
        nonempty = [index for index, request in enumerate(requests) if request.args[1]]
        results = super().loglikelihood([requests[index] for index in nonempty], disable_tqdm)
        scores = dict(zip(nonempty, results, strict=True))
        return [scores.get(index, (0.0, True)) for index in range(len(requests))]  # an empty text is certain

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        longest = self.decoder.target.max_positions
        pairs, overflows = [], []
        for _, context, continuation in requests:
            context = context or [self.prefix_token_id]
            if longest is not None:
                if len(continuation) > longest:
                    raise ContextLengthError(
                        f"a continuation has {len(continuation)} tokens, but the target a context of {longest}."
                    )
                room = longest + 1 - len(continuation)  # the last token is predicted, not read
                overflows.append(len(context) - room)
                context = context[-room:]
            pairs.append((context, continuation))
        self._announce(overflows)
        scored = [index for index, (_, answer) in enumerate(pairs) if answer]
        sums = log_likelihoods(self.decoder.target, [pairs[index] for index in scored])
        sums_by_index = dict(zip(scored, sums, strict=True))
        results = [sums_by_index.get(index, (0.0, 0)) for index in range(len(pairs))]
        return [(total, likeliest == len(answer)) for (total, likeliest), (_, answer) in zip(results, pairs)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text after the prefix token, which is not scored."""
        target, prefix = self.decoder.target, self.prefix_token_id
        sums = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(
                token_list=ids[1:] if ids[:1] == [prefix] else ids, prefix_token=prefix,
                max_seq_len=target.max_positions or 2048, context_len=1,
            )  # fmt: skip
            pairs = [make_disjoint_window(window) for window in windows]
            sums.append(sum(total for total, _ in log_likelihoods(target, pairs)))
        return sums

    def _announce(self, overflows: Sequence[int]) -> None:
        """Warn of prompts that were cut on the left, and count them. ``overflows``: tokens per prompt, if positive."""
        cut = [count for count in overflows if count > 0]
        if cut:
            self.cut_prompts += len(cut)
            warnings.warn(
                f"{len(cut)} of {len(overflows)} prompts do not fit the target's context of "
                f"{self.decoder.target.max_positions} tokens and lost up to {max(cut)} tokens on the left.",
                stacklevel=2,
            )

    # answers -------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return one answer per request, cut before the first text of its ``until``.

        Raises:
            FsdError: a generation option that speculative decoding does not support.
        """
        answers = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(index)
        with tqdm(total=len(requests), desc="fsd", disable=disable_tqdm) as bar:
            for indices in by_options.values():
                until, options = generate_options(requests[indices[0]].args[1])
                for start in range(0, len(indices), self.batch_size):
                    batch = indices[start : start + self.batch_size]
                    texts = self._answer([requests[index].args[0] for index in batch], until, options)
                    for index, text in zip(batch, texts, strict=True):
                        answers[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(batch))
        return answers

    def _answer(self, prompts: Sequence[str], until: list[str], options: dict[str, Any]) -> list[str]:
        ids = [self.tok_encode(prompt) or [self.prefix_token_id] for prompt in prompts]
        limit, max_new_tokens = self.decoder.target.max_positions, options["max_new_tokens"]
        if limit is not None:
            room = limit - max_new_tokens
            if room < 1:
                raise ContextLengthError(
                    f"max_gen_toks={max_new_tokens} leaves no room for a prompt in the target's context of {limit} "
                    f"tokens: give less, for example --gen_kwargs max_gen_toks={max(limit // 2, 1)}."
                )
            self._announce([len(prompt_ids) - room for prompt_ids in ids])
            ids = [prompt_ids[-room:] for prompt_ids in ids]
        stops = [Until(self.tokenizer, until, max(map(len, ids)))] if until else None
        start = time.perf_counter()
        generation = self.decoder.generate(
            ids, rule=self.rule, seed=self.seed + self._batches, stopping_criteria=stops, **options
        )
        self._batches += 1
        self.seconds += time.perf_counter() - start
        self.rows += generation.stats.rows
        return [cut(self.tokenizer, answer, until)[0] for answer in generation.sequences]

    def get_model_info(self) -> dict[str, Any]:
        """Return facts for the results: rule, drafter, and means per answer."""
        answers, tokens = len(self.rows), sum(row.new_tokens for row in self.rows)
        forwards = sum(row.target_forwards for row in self.rows)
        facts: dict[str, Any] = {
            "target": self.decoder.target.name,
            "rule": self.rule.describe(),
            "drafter": self.decoder.drafter.describe(),
            "answers": answers,
            "prompts_cut_on_the_left": self.cut_prompts,
        }
        if answers:
            facts |= {
                "tau": (tokens - answers) / forwards if forwards else None,
                "tokens_per_second": tokens / self.seconds,
                "answer_tokens": tokens / answers,
                "target_forwards": forwards / answers,
                "divergence_spent": sum(row.divergence_spent for row in self.rows) / answers,
                "cut_at_limit": sum(row.finish_reason == "length" for row in self.rows) / answers,
            }
        return {"fsd": facts}


def generate_options(asked: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Convert a task's ``generation_kwargs`` to (stop strings, arguments of ``FuzzyDecoder.generate``).

    Raises FsdError for values of the wrong type.
    """
    options = dict(asked)
    until = options.pop("until", None) or []
    limits = [options.pop(name, None) for name in LIMITS]
    if "max_length" in options:
        raise FsdError("max_length counts the prompt too: give max_gen_toks, the answer's length alone.")
    if options.pop("num_return_sequences", None) not in (None, 1):
        raise FsdError("num_return_sequences must be 1: a task scores one answer. Tasks ask again by `repeats`.")
    temperature = read_float(str(options.pop("temperature", None) or 0.0))
    if temperature is None or not 0 <= temperature < math.inf:
        raise FsdError(f"temperature must be 0 or above and finite, got {asked['temperature']!r:.60}.")
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, (list, tuple)) or not all(isinstance(text, str) for text in until):
        raise FsdError(f"until must be a text or a list of texts, got {until!r:.60}.")
    if not options.pop("do_sample", temperature > 0):
        temperature = 0.0
    options["max_new_tokens"] = next((_count("max_gen_toks", n) for n in limits if n is not None), NEW_TOKENS)
    options |= at_temperature(temperature)
    if not temperature:
        options.update(top_p=None, top_k=None)
    return list(until), options


def _count(name: str, value: int | str, least: int = 1) -> int:
    count = None if isinstance(value, bool) else read_int(str(value))
    if count is None or not least <= count <= MAX_SEED:
        raise FsdError(f"{name} must be a whole number from {least} on, got {value!r:.60}.")
    return count

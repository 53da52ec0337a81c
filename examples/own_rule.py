"""Write a rule: a draft passes if the target finds it at least half as likely as its own choice."""

import math
from dataclasses import dataclass

from fsd_infer import FuzzyDecoder
from fsd_infer.rules import RULES, LossyRule, OutputDistribution, RuleInputs, parameter


@RULES.register("near-best")
@dataclass(frozen=True)
class NearBest(LossyRule):
    """Drafts with `share` of the likeliest token's probability pass; the others are tested exactly."""

    share: float = parameter(0.5, above=0)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        return OutputDistribution.passing(inputs, inputs.log_p_max + math.log(self.share))


decoder = FuzzyDecoder.from_pretrained("smollm2-135m")
for rule in ("exact", "near-best:0.5", "near-best:0.5:budget=1"):
    made = decoder.generate("Why is the sky blue?", rule=rule, max_new_tokens=32, do_sample=False)
    stats = made.stats
    print(f"{rule}: {stats.acceptance_length:.2f} tokens per target forward, {stats.divergence_spent:.2f} nats spent")

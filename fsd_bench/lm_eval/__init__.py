"""EleutherAI's lm-evaluation-harness: a model class ``fsd``, and tasks on local files.

    lm_eval --model fsd --model_args target=smollm2-135m,rule=fuzzy:js:0.3 --apply_chat_template \\
        --tasks "$(python -m fsd_bench.lm_eval)/svamp.yaml" --metadata '{"data": "folder/of/svamp"}'

A task file given by its path imports this package, which registers ``fsd`` with the harness's own command. With the
harness's tasks, given by name, run ``python -m fsd_bench.lm_eval`` instead of ``lm_eval``. Needs the extra
``lm-eval``.
"""

from __future__ import annotations

from pathlib import Path

from lm_eval.api.registry import register_model

from fsd_bench.lm_eval.model import FsdLM

TASKS = Path(__file__).with_name("tasks")  # a folder of task files

register_model("fsd")(FsdLM)

__all__ = ["TASKS", "FsdLM"]

"""What the task files in this folder call. The harness loads this file by its path; importing our package makes the
model class ``fsd`` known to it.
"""

from fsd_bench.lm_eval.scoring import asked, passes, programs, rows, score

__all__ = ["asked", "passes", "programs", "rows", "score"]

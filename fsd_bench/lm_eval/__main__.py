"""The harness's command with the model ``fsd`` registered; without arguments it prints the folder of our tasks."""

import sys

from lm_eval.__main__ import cli_evaluate

from fsd_bench.lm_eval import TASKS

if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(TASKS)
    else:
        cli_evaluate()

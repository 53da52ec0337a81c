"""``python -m fsd_bench`` runs ``fsd-bench``."""

import sys

from fsd_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())

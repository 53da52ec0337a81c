"""``python -m fsd_infer`` runs ``fsd-infer``."""

import sys

from fsd_infer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

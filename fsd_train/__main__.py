"""``python -m fsd_train`` runs ``fsd-train``."""

import sys

from fsd_train.cli import main

if __name__ == "__main__":
    sys.exit(main())

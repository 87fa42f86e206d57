"""``python -m anyformer``."""

import sys

from anyformer.cli import main

if __name__ == "__main__":
    sys.exit(main())

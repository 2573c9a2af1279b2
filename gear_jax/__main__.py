"""`python -m gear_jax`."""

import sys

from gear_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())

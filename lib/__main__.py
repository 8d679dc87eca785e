"""`python -m lib`: the command line."""

import sys

from lib.cli import main

sys.exit(main())

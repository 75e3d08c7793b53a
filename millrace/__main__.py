"""`python -m millrace` is `millrace`."""

import sys

from millrace.cli import main

sys.exit(main())

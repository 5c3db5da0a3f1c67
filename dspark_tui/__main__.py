"""`python -m dspark_tui` is `dspark-tui`."""

import sys

from dspark_tui.cli import main

sys.exit(main())

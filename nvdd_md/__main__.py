"""``python -m nvdd_md`` is the command ``nvdd-md``."""

import sys
from contextlib import nullcontext

from nvdd_md.jobs.early_stop import recording_stop_signals

if __name__ == "__main__":
    # Before the imports, which take most of the time until a job begins.
    with recording_stop_signals() if sys.argv[1:2] == ["run"] else nullcontext():
        from nvdd_md.cli import main

        sys.exit(main())

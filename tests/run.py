"""All tests in two processes: those that share a real node, and beside them all others; and lint.

The node's rollouts run when a core is free, so nobody keeps a second one busy without need.

Ctrl-C reaches all, and each cleans up after itself before this ends.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

ONE_CORE = os.environ | {"OMP_NUM_THREADS": "1"}
PYTEST = (sys.executable, "-m", "pytest", "--durations=20")


def main() -> int:
    with tempfile.TemporaryFile("w+") as log:
        checks = {"stdout": log, "stderr": subprocess.STDOUT, "env": ONE_CORE}
        lint = subprocess.Popen(["make", "--no-print-directory", "lint"], **checks)
        others = subprocess.Popen([*PYTEST, "-m", "not node"], **checks)
        engines = subprocess.Popen([*PYTEST, "-m", "node", "tests/bench", "tests/engines"])
        all_ = (engines, others, lint)

        def stop(*_: object) -> None:
            for one in all_:
                with suppress(ProcessLookupError):
                    one.send_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells them too
        signal.signal(signal.SIGTERM, stop)
        codes = [one.wait() for one in all_]
        log.seek(0)
        print(log.read())
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())

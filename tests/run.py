"""All tests in two processes: those that share a real node, and beside them all others.

Ctrl-C reaches both, and each cleans up after itself before this ends.
"""

import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

PYTEST = (sys.executable, "-m", "pytest", "--durations=20")


def main() -> int:
    with tempfile.TemporaryFile("w+") as log:
        others = subprocess.Popen([*PYTEST, "-m", "not node"], stdout=log, stderr=subprocess.STDOUT)
        engines = subprocess.Popen([*PYTEST, "-m", "node", "tests/bench", "tests/engines"])
        both = (engines, others)

        def stop(*_: object) -> None:
            for one in both:
                with suppress(ProcessLookupError):
                    one.send_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells them too
        signal.signal(signal.SIGTERM, stop)
        codes = [one.wait() for one in both]
        log.seek(0)
        print(log.read())
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())

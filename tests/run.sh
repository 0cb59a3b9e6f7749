#!/usr/bin/env bash
# All tests in two processes: those with engines, which mostly wait, and beside them all others.
set -u
python=$1
log=$(mktemp)
"$python" -m pytest --ignore tests/engines >"$log" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
"$python" -m pytest tests/engines
engines=$?
wait "$others"
rest=$?
cat "$log"
exit $((engines || rest))

#!/usr/bin/env bash
# Runs the tests that have just failed once more, one after another, and says which of them were merely short of time.
# Fails where one fails again, or where more failed than a stall of the machine explains.
# Usage: scripts/once_more.sh PYTEST
set -euo pipefail

failed=$("$1" -o addopts=--import-mode=importlib -q --collect-only --last-failed --last-failed-no-failures none | grep :: || true)
count=$(grep -c :: <<<"$failed" || true)
if ((count < 1 || count > 3)); then
    echo "$count tests failed: they are not run again." >&2
    exit 1
fi
printf 'Once more, alone:\n%s\n' "$failed"
"$1" --last-failed --last-failed-no-failures none
printf 'Passed alone, failed beside others; look for a deadline that is too short:\n%s\n' "$failed"

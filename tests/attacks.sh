#!/usr/bin/env bash
# Repeats, as a whole, every attack on the harness of which a commit repeats a part, and writes down how many of each kind were
# tried and held: reports/reliability.md. It takes half an hour on two cores.
#
# A test says of each attack that it held, as a line `attack: COUNT KIND`; one that fails is listed, and the script ends with 1.
set -uo pipefail
cd "$(dirname "$0")/.."

REPORT=reports/reliability.md
LOG=$(mktemp)
trap 'rm -f "$LOG"' EXIT
export PARITY_TESTS=all
START=$SECONDS
REVISION=$(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo ' with changes')

attack() { cargo test --locked "$@" 2>&1 | tee -a "$LOG" | grep -E '^test |panicked'; }

attack -p dsv4-kernels --lib -- cache:: worker:: remote:: --nocapture --test-threads 1
attack --test suite -- hostile:: fuzz:: bad_input:: shard:: rank_processes:: external::nothing_of --nocapture --test-threads 1
attack --test operators -- numbers

# A line of a test may begin behind another one's words.
held() { grep -oE 'attack: [0-9]+ [a-z ,]+' "$LOG" | sed 's/^attack: //'; }
# Each binary lists its failures by name at its end.
failed() { awk '/^failures:$/ { listed = 1 } /^test result:/ { listed = 0 } listed && /^    [a-z_0-9:]+$/ { print $1 }' "$LOG" | sort -u; }

{
    echo "# What was tried against the harness"
    echo
    echo "By \`tests/attacks.sh\` at $REVISION, in $((SECONDS - START)) s on $(nproc) cores ($(g++ --version | head -n 1))."
    echo
    echo "| what | tried | held |"
    echo "| --- | --: | --: |"
    held | awk '{ n = $1; $1 = ""; sum[substr($0, 2)] += n } END { for (kind in sum) printf "| %s | %d | %d |\n", kind, sum[kind], sum[kind] }' | sort
    failed | sed 's/^/| `/; s/$/` | | FAILED |/'
} > "$REPORT"
cat "$REPORT"
[ -z "$(failed)" ]

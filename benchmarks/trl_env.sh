#!/usr/bin/env bash
# Makes .venv-trl from benchmarks/trl.lock: the peer in an environment of its own. Does nothing where it is current.
set -euo pipefail
cd "$(dirname "$0")/.."

digest=$("${PYTHON:-python3.11}" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()[:16])' benchmarks/trl.lock)
stamp=.venv-trl/.setup-$digest
if [ -e "$stamp" ]; then
    exit 0
fi
echo "trl_env: installing benchmarks/trl.lock into .venv-trl" >&2
"${PYTHON:-python3.11}" -m venv --clear .venv-trl
.venv-trl/bin/python -m pip install --quiet -r benchmarks/trl.lock >&2
touch "$stamp"

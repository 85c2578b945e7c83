#!/usr/bin/env bash
# Makes .venv-ray from benchmarks/ray.lock, with the packages of the Python in $PYTHON behind its own. Does nothing
# where it is current.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
digest=$("$python" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()[:16])' benchmarks/ray.lock)
stamp=.venv-ray/.setup-$digest
if [ -e "$stamp" ]; then
    exit 0
fi
echo "ray_env: installing benchmarks/ray.lock into .venv-ray" >&2
"$python" -m venv --clear .venv-ray
.venv-ray/bin/python -m pip install --quiet --no-deps -r benchmarks/ray.lock >&2
where='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$where" > "$(.venv-ray/bin/python -c "$where")/benchmark.pth"
touch "$stamp"

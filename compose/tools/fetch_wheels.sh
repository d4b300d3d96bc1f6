#!/bin/sh
# Fills compose/wheels with what the image needs, at the versions of requirements.lock.
#
# With wheels there, `docker compose build` asks no package index.  The wheels must suit the image's
# Python and platform, so run this with the same Python version that the base image has.
#
#   usage: fetch_wheels.sh                 (PYTHON names the interpreter; default python3)
set -eu

cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
list=$(mktemp)
trap 'rm -f "$list"' EXIT

"$PYTHON" compose/tools/image_requirements.py >"$list"
# What is there already is not fetched again; older versions do no harm, since the lock decides.
"$PYTHON" -m pip download --quiet --disable-pip-version-check --only-binary :all: \
    --constraint requirements.lock --requirement "$list" --dest compose/wheels
# A base image without a package manager cannot compile: where there is a compiler here, do it here.
if command -v gcc >/dev/null; then
    gcc -shared -fPIC -O1 -pthread -Wl,-soname,libnvidia-ml.so.1 \
        -o compose/wheels/libnvidia-ml.so.1 tests/fakenvml/fakenvml.c
fi
echo "compose/wheels holds $(find compose/wheels -name '*.whl' | wc -l) wheels"

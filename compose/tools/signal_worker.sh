#!/bin/sh
# Sends a signal to the worker of a node of the running stack, to see what Outrider makes of it.
#
#   usage: signal_worker.sh NODE SIGNAL     (KILL is a crash, STOP a hang)
#          COMPOSE names the command that stands before `exec`, if it is another.
set -eu

if [ $# -ne 2 ]; then
    echo 'usage: signal_worker.sh NODE SIGNAL, as in: signal_worker.sh node-1 KILL' >&2
    exit 2
fi
COMPOSE=${COMPOSE:-docker compose -f $(dirname "$0")/../docker-compose.yml}

# The coordinator knows the worker's process id as the node's container sees it.
pid=$($COMPOSE exec -T coordinator outrider status --json | python3 -c '
import json, sys
for node in json.load(sys.stdin)["nodes"]:
    if node["node"] == sys.argv[1]:
        print(*(rank["pid"] for rank in node["ranks"][:1]))' "$1")
if [ -z "$pid" ]; then
    echo "signal_worker: $1 runs no worker at the moment; try again, or look at outrider status" >&2
    exit 1
fi
$COMPOSE exec -T "$1" sh -c "kill -s $2 $pid"
echo "sent $2 to process $pid on $1"

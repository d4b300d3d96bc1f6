#!/bin/sh
# Runs a command with a container engine of its own, and leaves nothing of it behind.
#
# For machines where no engine runs, such as a CI machine that has just installed docker.io.  The
# engine keeps its data, its socket and its process files in one temporary folder; afterwards it is
# stopped, what it mounted is unmounted, its bridge is deleted if it made it, and the packet filter
# is put back as it was.  Needs root.
#
#   usage: with_engine.sh COMMAND [ARGUMENT...]
set -eu

START_S_MAX=60
STOP_S_MAX=30

fail() {
    echo "with_engine: $1" >&2
    exit 1
}

[ $# -gt 0 ] || fail 'no command given'
[ "$(id -u)" = 0 ] || fail 'an engine of its own needs root; start dockerd, or run this with sudo'
for program in dockerd docker ip iptables-save iptables-restore; do
    command -v $program >/dev/null ||
        fail "no $program; run: apt-get install docker.io iptables iproute2"
done

home=$(mktemp -d /tmp/outrider-engine.XXXXXX)
had_bridge=$([ -e /sys/class/net/docker0 ] && echo yes || echo no)
# Naming the tables prints them even when nobody has used them, so that they can be emptied again.
for table in filter nat; do iptables-save -t $table; done >"$home/packet-filter"
forwarding=$(cat /proc/sys/net/ipv4/ip_forward)
engine=

leave() {
    status=$?
    trap - EXIT INT TERM
    if [ -n "$engine" ]; then
        kill "$engine" 2>/dev/null || true
        waited=0
        while kill -0 "$engine" 2>/dev/null && [ $waited -lt $STOP_S_MAX ]; do
            sleep 1
            waited=$((waited + 1))
        done
        kill -9 "$engine" 2>/dev/null || true
        wait "$engine" 2>/dev/null || true
    fi
    # The deepest mount first; the network namespace of the engine stays mounted after it is gone.
    awk -v home="$home/" 'index($5, home) == 1 {print $5}' /proc/self/mountinfo | sort -r |
        while read -r mount; do umount "$mount" || true; done
    [ "$had_bridge" = yes ] || ip link delete docker0 2>/dev/null || true
    iptables-restore <"$home/packet-filter" || true
    echo "$forwarding" >/proc/sys/net/ipv4/ip_forward
    rm -rf "$home"
    exit $status
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

export DOCKER_HOST="unix://$home/engine.sock"
dockerd --data-root "$home/data" --exec-root "$home/exec" --pidfile "$home/engine.pid" \
    --host "$DOCKER_HOST" >"$home/engine.log" 2>&1 </dev/null &
engine=$!

waited=0
until docker info >/dev/null 2>&1; do
    if ! kill -0 $engine 2>/dev/null || [ $waited -ge $START_S_MAX ]; then
        tail -n 20 "$home/engine.log" >&2
        fail 'the engine did not start; its last lines are above'
    fi
    sleep 1
    waited=$((waited + 1))
done

"$@"

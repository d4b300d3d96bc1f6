#!/bin/sh
# Makes every image that compose/docker-compose.yml would pull, out of what this machine has.
#
# For machines that cannot pull images.  The base image comes from the machine's own Python (see
# make_base_image.sh), Prometheus and Alertmanager from Debian's packages.  They get the tags that
# the compose file asks for, so that `up` works unchanged; a label says where they came from, and
# an image that is already here is left alone.  Debian's versions are older than the tags say, so
# this is for trying and testing.  There is no Debian package of Grafana: it stays missing.
#
#   usage: make_local_images.sh            (tags as in the compose file, or from the environment:
#                                           PYTHON_IMAGE, PROMETHEUS_IMAGE, ALERTMANAGER_IMAGE)
set -eu

PYTHON_IMAGE=${PYTHON_IMAGE:-python:3.11-slim}
PROMETHEUS_IMAGE=${PROMETHEUS_IMAGE:-prom/prometheus:v2.53.4}
ALERTMANAGER_IMAGE=${ALERTMANAGER_IMAGE:-prom/alertmanager:v0.27.0}
NOBODY=65534

fail() {
    echo "make_local_images: $1" >&2
    exit 1
}

for program in prometheus promtool prometheus-alertmanager amtool; do
    command -v "$program" >/dev/null ||
        fail "no $program; run: apt-get install prometheus prometheus-alertmanager"
done
sh "$(dirname "$0")/make_base_image.sh" "$PYTHON_IMAGE"

# package_image TAG PACKAGE DATA_FOLDER PORT SERVER=NAME TOOL=NAME: the base image with a package's
# two programs under upstream's names, run by nobody, who owns the data folder.
package_image() {
    if docker image inspect "$1" >/dev/null 2>&1; then
        echo "$1 is already here, nothing to do"
        return
    fi
    version=$(dpkg-query --show --showformat='${Version}' "$2")
    staging=$(mktemp -d)
    container=$(docker create "$PYTHON_IMAGE")
    trap 'rm -rf "$staging"; docker rm -f "$container" >/dev/null' EXIT
    mkdir "$staging/programs" "$staging/$3"
    for pair in "$5" "$6"; do
        cp -L "$(command -v "${pair%%=*}")" "$staging/programs/${pair#*=}"
    done
    tar -C "$staging/programs" --owner=0 --group=0 -c . | docker cp - "$container:/usr/bin"
    # Debian keeps templates and pages beside the programs, where upstream builds them in.
    tar -C / -c --dereference --owner=0 --group=0 usr/share/prometheus | docker cp - "$container:/"
    tar -C "$staging" --owner=$NOBODY --group=$NOBODY -c "$3" | docker cp - "$container:/"
    docker commit \
        --change "USER $NOBODY:$NOBODY" --change "WORKDIR /$3" --change "EXPOSE $4" \
        --change "ENTRYPOINT [\"/bin/${5#*=}\"]" --change 'CMD []' \
        --change "LABEL org.opencontainers.image.description=\"Debian package $2 $version\"" \
        "$container" "$1" >/dev/null
    docker rm -f "$container" >/dev/null
    rm -rf "$staging"
    trap - EXIT
    echo "made $1 from the package $2 $version"
}

package_image "$PROMETHEUS_IMAGE" prometheus prometheus 9090 \
    prometheus=prometheus promtool=promtool
package_image "$ALERTMANAGER_IMAGE" prometheus-alertmanager alertmanager 9093 \
    prometheus-alertmanager=alertmanager amtool=amtool

#!/bin/bash
# Runs what asks Prometheus and Alertmanager here against newer ones than this Debian has.
#
# usage: tools/newer_prometheus.sh [SUITE]
#
# Takes the packages of another suite (sid when nothing is said) from the mirror that this
# machine's apt uses, unpacks them below build/, and puts them first on the path: nothing is
# installed and apt's own lists stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."

suite="${1:-sid}"
folder="$PWD/build/prometheus-$suite"
mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sort -u | head -n 1)"
[ -n "$mirror" ] || { echo "apt knows no mirror here; run apt-get update first" >&2; exit 1; }

mkdir -p "$folder"/{lists/partial,cache/archives/partial,unpacked}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" \
  > "$folder/sources.list"
own_apt=(-q
  -o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/cache")
apt-get "${own_apt[@]}" update > "$folder/apt.log" 2>&1 \
  || { echo "no lists of $suite from $mirror; what apt said is in $folder/apt.log" >&2; exit 1; }

packages=(prometheus prometheus-alertmanager)
# promtool is a package of its own since Prometheus 3.
if apt-cache "${own_apt[@]}" show "promtool" > /dev/null 2>&1; then packages+=(promtool); fi
rm -f "$folder"/*.deb
(cd "$folder" && apt-get "${own_apt[@]}" download "${packages[@]/%//$suite}" >> apt.log 2>&1) \
  || { echo "no ${packages[*]} in $suite; what apt said is in $folder/apt.log" >&2; exit 1; }
for package in "$folder"/*.deb; do dpkg-deb -x "$package" "$folder/unpacked"; done

export PATH="$folder/unpacked/usr/bin:$PATH"
prometheus --version 2>&1 | head -n 1
prometheus-alertmanager --version 2>&1 | head -n 1
promtool check rules alerts/outrider.rules.yaml
promtool test rules alerts/outrider.rules.test.yaml
promtool check config --syntax-only compose/prometheus.yml
amtool check-config alerts/alertmanager.yaml
.venv/bin/python -m pytest -q tests/history tests/component/test_alertmanager.py tests/unit/alerts

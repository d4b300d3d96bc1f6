#!/bin/sh
# Gives a node two simulated GPUs and a kernel log, then becomes `outrider` with what it was told.
#
# Both are files in the node's own volume that compose/inject.sh writes to.  What was broken before
# stays broken when the container starts again, as on a real machine; a new volume is a new machine.
set -eu

state=/var/lib/outrider
if [ ! -f "$state/nvml" ]; then
    cat >"$state/nvml.new" <<'SCRIPT'
node.count 2
all.temperature 55
all.shutdown 95
all.ecc_unc_vol 0
all.ecc_unc_agg 0
all.ecc_cor_vol 0
all.ecc_cor_agg 0
all.remap_failure 0
all.pcie_replay 0
all.throttle 0
all.nvlinks 4
all.links_replay 0
all.links_recovery 0
all.links_crc_flit 0
all.links_crc_data 0
all.fabric_state 3
all.fabric_summary 1
all.field230 0
SCRIPT
    mv "$state/nvml.new" "$state/nvml"
fi
[ -f "$state/kernel.log" ] || : >"$state/kernel.log"
exec outrider "$@"

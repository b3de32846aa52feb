#!/usr/bin/env bash
# In the guest, as root on the host's files: makes the soft-RoCE device and runs what boot.py asks for over it. Never run it elsewhere.
set -euo pipefail
. /run/guest.env
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/home TMPDIR=/run/tmp LC_ALL=C.UTF-8
export PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/run/tmp/hypothesis

hostname rdma-guest 2>/dev/null || true
ip link set lo up
# A frame has to hold RoCE's largest packet, 4,096 bytes, and its headers.
ip link add d0 type dummy
ip link set d0 mtu 4200 up
ip address add 10.99.0.1/24 dev d0
rdma link add rxe0 type rxe netdev d0
ulimit -l unlimited

# NIXL's wheel has a libibverbs of its own, which looks for drivers where Debian has none: the system's takes its place.
while IFS=: read -r system carried; do
  [ -z "$carried" ] || mount --bind "$system" "$carried"
done <<< "$SUBSTITUTES"

# Verbs alone: UCX has no TCP and no shared memory left. GID 1 is the device's IPv4 address (RoCE v2). Time-outs: UCX connects by datagrams
# (ud), and gives a peer that never answers 5 minutes if not told otherwise. A queue pair (rc) that sees no answer is dead after so many
# retries: 6, for 7, UCX's default, soft-RoCE takes as "without end" (a card does not), and UCX's keepalive would find it after 20 s at the soonest.
export UCX_TLS=rc_verbs,ud_verbs,self UCX_NET_DEVICES=rxe0:1 UCX_IB_GID_INDEX=1
export UCX_UD_TIMEOUT=10s UCX_RC_TIMEOUT=500ms UCX_RC_RETRY_COUNT=6

cd "$ROOT"
eval "$COMMAND"

# shellcheck shell=bash
# What the lab's scripts share. Sourced.
LAB=${LAB:-/var/lib/mingpt-lab} # outside /tmp (each node has one of its own) and readable by every user
NODES=${NODES:-6}
GPUS=${GPUS:-4}                 # of each node: declared, so that they are scheduled for real; there is no CUDA
PYTHON=${PYTHON:-python3}       # trains on the nodes
NETWORK=10.99.0                 # its hosts are .1, the controller and login node, and .11, .12, … the nodes
ONE=mglab                       # namespaces: mglab-ctl, mglab-n1, …
# Nodes of one cluster have differently named network cards.
INTERFACES=(eth0 ens1f1 ens1f0np0 enp4s0 eno1np1 bond0)
WHO=mguser ID=4242              # who runs jobs; an account of the lab's namespaces only
lab=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$lab/../.." && pwd)
sky=$project/.venv-sky
unset PYTHONDONTWRITEBYTECODE # whoever sets it compiles everything again at each start, on each node

#!/bin/bash
# TaskProlog: what the administrator of a cluster without a way out sets for all jobs.
echo "export PATH=@LAB@/opt/bin:$PATH"
echo "export UV_CONFIG_FILE=@LAB@/etc/uv.toml"
echo "export PIP_NO_INDEX=1"
echo "export PIP_FIND_LINKS=@LAB@/wheelhouse"

#!/usr/bin/env bash
# What would SkyPilot rent on AWS? Its own AWS code answers with --dryrun, moto stands for AWS, and the catalogs are a few
# rows written by hand (instances and prices of 2025; spot prices are made up).
#   tests/lab/aws/dryrun.sh SKY_ENVIRONMENT FOLDER <commands
# Each line of standard input is the arguments of one `sky` command; its output and exit code are FOLDER/0.txt, 1.txt, …
# All of it in a network without a way out, and as one family of processes, none of which is left at the end.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ "${3:-}" != inside ]; then
  user=; [ "$(id -u)" = 0 ] || user=--map-root-user
  exec unshare $user --net --mount --pid --fork --kill-child --mount-proc bash "$here/dryrun.sh" "$1" "$2" inside
fi
sky=$(cd "$1" && pwd) out=$2
ip link set lo up

export HOME=$out/home PATH=$sky/bin:$PATH SKYPILOT_DISABLE_USAGE_COLLECTION=1
# SkyPilot builds a wheel of itself for the machines, even for a --dryrun; pip would fetch setuptools for that. (pip reads
# "no isolation: false" as "isolation: false".)
export PIP_NO_BUILD_ISOLATION=false
export AWS_ENDPOINT_URL=http://127.0.0.1:5005 AWS_DEFAULT_REGION=us-east-1
export AWS_ACCESS_KEY_ID=testing AWS_SECRET_ACCESS_KEY=testing
mkdir -p "$HOME/.aws" "$HOME/.sky/catalogs/v8"
printf '[default]\naws_access_key_id = testing\naws_secret_access_key = testing\nregion = us-east-1\n' |
  tee "$HOME/.aws/credentials" >"$HOME/.aws/config"
cp -r "$here"/catalogs/* "$HOME/.sky/catalogs/v8/"

moto_server -H 127.0.0.1 -p 5005 >"$out/moto.txt" 2>&1 &
until (: </dev/tcp/127.0.0.1/5005) 2>/dev/null; do
  kill -0 $! 2>/dev/null || { cat "$out/moto.txt" >&2; exit 1; }
  sleep 0.1
done
image=$(python -c "
import boto3
disk = [{'DeviceName': '/dev/sda1', 'Ebs': {'VolumeSize': 40}}]
print(boto3.client('ec2').register_image(Name='sky', RootDeviceName='/dev/sda1', BlockDeviceMappings=disk)['ImageId'])
")
sed -i "s/IMAGE/$image/" "$HOME/.sky/catalogs/v8/aws/images.csv"

# sky api start, which gives its server 60 s to start: too few beside many other tests.
timeout 300 python - >"$out/api.txt" 2>&1 <<'PYTHON' || { cat "$out/api.txt" >&2; exit 1; }
import sys
from sky.server import common
common.WAIT_APISERVER_START_TIMEOUT_SEC = 280
from sky.cli import cli
sys.argv = ["sky", "api", "start"]
cli()
PYTHON
timeout 300 sky check aws >"$out/check.txt" 2>&1 || { cat "$out/check.txt" >&2; exit 1; }
# One client for all commands, since one takes longer to start than to be answered.
cat >"$out/commands.py" <<'PYTHON'
import contextlib
import pathlib
import shlex
import sys
import traceback

from sky.cli import cli

out_dir = pathlib.Path(sys.argv[1])
for number, line in enumerate(sys.stdin):
    code: object = 0
    with (out_dir / f"{number}.txt").open("w") as out:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                sys.argv = ["sky", *shlex.split(line)]
                cli()
            except SystemExit as end:
                code = end.code or 0
            except Exception:
                traceback.print_exc()
                code = 1
        print("exit code", code, file=out)
PYTHON
python "$out/commands.py" "$out"

#!/usr/bin/env bash
# client.sh sky …: runs a command as a user of the lab has it: SkyPilot's home, and no word to anyone outside.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export HOME=$LAB/sky PATH=$sky/bin:$PATH SKYPILOT_DISABLE_USAGE_COLLECTION=1
exec "$@"

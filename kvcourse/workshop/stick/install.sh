#!/bin/sh
# Installs the course from this stick, without a network: sh install.sh [FOLDER]
stick=$(dirname "$0")
for python in @PYTHONS@ python3 python; do
    "$python" -c 'import sys; sys.exit(f"{sys.version_info[0]}.{sys.version_info[1]}" not in "@VERSIONS@".split())' \
        2>/dev/null && exec "$python" "$stick/install.py" "$@"
done
echo "install: no Python @VERSIONS@ was found here, and this stick was made for it" >&2
exit 1

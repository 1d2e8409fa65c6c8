#!/bin/bash
# The old places of recipes and of the launcher, which will go with the next release: each is a link to this file.
for new in "$(dirname "$0")"/{launch,recipes}/"$(basename "$0")"; do
    if [ -e "$new" ]; then
        echo "note: $0 is now $new" >&2
        exec "$new" "$@"
    fi
done
echo "$0 starts nothing by itself" >&2
exit 2

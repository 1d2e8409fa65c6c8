#!/bin/bash
# Called under the old names of recipes and of the launcher, which are links to this file and will be
# removed in the next release.
for new in "$(dirname "$0")"/{launch,recipes}/"$(basename "$0")"; do
    if [ -e "$new" ]; then
        echo "note: $0 is now $new" >&2
        exec "$new" "$@"
    fi
done
echo "$0 starts nothing by itself" >&2
exit 2

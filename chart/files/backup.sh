#!/bin/sh
# One dump of the database to /backup, whole or not there at all; the newest $KEEP stay.
set -eu
umask 077
: "${KEEP:?}" "${PGHOST:?}" "${PGDATABASE:?}" "${PGUSER:?}" "${PGPASSWORD:?}"
name="/backup/nebula-$(date -u +%Y%m%dT%H%M%SZ).dump"
rm -f /backup/*.part
pg_dump --format=custom --file="$name.part"
mv "$name.part" "$name"
ls -1 /backup/nebula-*.dump | sort -r | tail -n "+$((KEEP + 1))" | while read -r old; do rm -f "$old"; done
echo "nebula: wrote $name ($(wc -c <"$name") bytes), $(ls -1 /backup/nebula-*.dump | wc -l) kept"

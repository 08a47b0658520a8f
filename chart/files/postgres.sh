#!/bin/sh
# Runs Postgres on $PGDATA. Makes the data once, whole or not at all; refuses data of another major version;
# gives the role the password of the Secret at every start, so that a kept volume and a new Secret agree.
set -eu
umask 077
: "${PGDATA:?}" "${DATABASE:?}" "${DATABASE_USER:?}" "${DATABASE_PASSWORD:?}" "${MAJOR:?}" "${SOCKETS:?}"
PATH="$PATH:/usr/lib/postgresql/$MAJOR/bin:/usr/local/pgsql/bin"

say() { echo "nebula: $*" >&2; }
fail() { say "$*"; exit 1; }

[ "$(id -u)" != 0 ] || fail "Postgres does not run as root: give the Pod a securityContext with runAsUser"
command -v postgres >/dev/null || fail "no postgres in this image's PATH"
program=$(postgres --version | sed 's/[^0-9]*\([0-9][0-9]*\).*/\1/')
[ "$program" = "$MAJOR" ] || fail "the image has Postgres $program, database.bundled.majorVersion is $MAJOR: make them agree"

if ! getent passwd "$(id -u)" >/dev/null 2>&1; then # an arbitrary UID, as on OpenShift: initdb wants a name for it
  for library in /usr/lib/*/libnss_wrapper.so /usr/lib/libnss_wrapper.so; do
    [ -r "$library" ] || continue
    echo "postgres:x:$(id -u):$(id -g):postgres:/tmp:/bin/sh" >/tmp/passwd
    echo "postgres:x:$(id -g):" >/tmp/group
    export LD_PRELOAD="$library" NSS_WRAPPER_PASSWD=/tmp/passwd NSS_WRAPPER_GROUP=/tmp/group
  done
fi

quoted() { printf %s "$1" | sed "s/'/''/g"; }
named() { printf %s "$1" | sed 's/"/""/g'; }
# One statement a line. Nothing listens, and nothing of it is logged.
single() { postgres --single -j -c log_statement=none -c log_min_duration_statement=-1 -D "$1" "$2" >/dev/null; }

if [ ! -s "$PGDATA/PG_VERSION" ]; then
  new="$PGDATA.new" # what a killed start has left is made again
  [ ! -e "$PGDATA" ] || [ -z "$(ls -A "$PGDATA")" ] || fail "$PGDATA is neither empty nor Postgres data: not touched"
  rm -rf "$new"
  say "making the database in $PGDATA"
  initdb --pgdata="$new" --username=postgres --encoding=UTF8 --locale=C --auth-local=trust --auth-host=scram-sha-256 --no-instructions >&2
  echo "host all all all scram-sha-256" >>"$new/pg_hba.conf"
  {
    printf 'CREATE ROLE "%s" LOGIN;\n\n' "$(named "$DATABASE_USER")"
    printf 'CREATE DATABASE "%s" OWNER "%s";\n\n' "$(named "$DATABASE")" "$(named "$DATABASE_USER")"
  } | single "$new" postgres
  rmdir "$PGDATA" 2>/dev/null || true
  mv "$new" "$PGDATA"
fi

have=$(cat "$PGDATA/PG_VERSION")
[ "$have" = "$MAJOR" ] || fail "the data is of Postgres $have and the image of $MAJOR: nothing was touched. \
Start the old version, take a dump, and restore it into a new volume (docs/install.md, Upgrading Postgres)"

printf "ALTER ROLE \"%s\" PASSWORD '%s';\n\n" "$(named "$DATABASE_USER")" "$(quoted "$DATABASE_PASSWORD")" | single "$PGDATA" postgres
if [ -n "${REPORT_USER:-}" ]; then # it may read what the controller grants it: the reports
  [ "$REPORT_USER" != "$DATABASE_USER" ] && [ "$REPORT_USER" != postgres ] || fail "the report role must be a role of its own"
  {
    printf "DO \$nebula\$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '%s') THEN CREATE ROLE \"%s\" LOGIN; END IF; END \$nebula\$;\n\n" \
      "$(quoted "$REPORT_USER")" "$(named "$REPORT_USER")"
    printf "ALTER ROLE \"%s\" PASSWORD '%s';\n\n" "$(named "$REPORT_USER")" "$(quoted "${REPORT_PASSWORD:?}")"
  } | single "$PGDATA" postgres
fi
unset DATABASE_PASSWORD REPORT_PASSWORD

postgres -D "$PGDATA" -c listen_addresses='*' -c unix_socket_directories="$SOCKETS" -c password_encryption=scram-sha-256 \
  -c log_destination=stderr -c logging_collector=off "$@" &
server=$!
# SIGTERM lets every client finish first, which ours never do: end them, write all out, stop.
trap 'kill -INT "$server" 2>/dev/null || true' TERM INT
while :; do
  code=0
  wait "$server" || code=$?
  kill -0 "$server" 2>/dev/null || exit "$code"
done

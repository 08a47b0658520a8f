#!/usr/bin/env bash
# One Pod on RunPod and back again, on a cluster where Nebula runs with the provider runpod. It costs money: a few cents.
#
#   RUNPOD_E2E=1                 the gate: without exactly that nothing is asked and nothing rented
#   RUNPOD_API_KEY               the key that Nebula has; here it only looks
#   RUNPOD_E2E_CAPACITY_CHECK=1  ask the catalogue first, and skip where it says that there is none
#   RUNPOD_E2E_ACCELERATOR=A40   RUNPOD_E2E_GPU_ID="NVIDIA A40"   RUNPOD_E2E_MAX_PRICE=1   dollars an hour
#   RUNPOD_E2E_NODE=nebula-runpod   RUNPOD_E2E_PROVIDER=runpod   RUNPOD_E2E_TIMEOUT_S=1800
#   RUNPOD_API_URL=https://api.runpod.io   a simulator's address, for a dry run
#
# Afterwards: the pod was there at RunPod under our identity, Pod and binding agreed, and by id and by identity nothing is left.
set -euo pipefail

if [ "${RUNPOD_E2E:-}" != 1 ]; then
  echo "skipped: this rents a machine; set RUNPOD_E2E=1 to let it"
  exit 0
fi
: "${RUNPOD_API_KEY:?set it to the key that Nebula has}"
url=${RUNPOD_API_URL:-https://api.runpod.io}
kind=${RUNPOD_E2E_ACCELERATOR:-A40}
gpu=${RUNPOD_E2E_GPU_ID:-NVIDIA A40}
provider=${RUNPOD_E2E_PROVIDER:-runpod}
node=${RUNPOD_E2E_NODE:-nebula-$provider}
ceiling=${RUNPOD_E2E_MAX_PRICE:-1}
timeout_s=${RUNPOD_E2E_TIMEOUT_S:-1800}
namespace=nebula-smoke
pool=runpod-smoke
pod=runpod-smoke

# get PATH: the answer of RunPod, its status on the last line. The key is in no argument, since those can be listed.
get() {
  curl -sS -m 30 -w '\n%{http_code}' -A nebula-smoke -H @- "$url/v2$1" <<<"Authorization: Bearer $RUNPOD_API_KEY"
}
# pick EXPRESSION: python over the JSON `it` from stdin
pick() {
  python3 -c "import json, sys
it = json.load(sys.stdin)
found = $1
print('' if found is None else found)"
}
fail() {
  echo "FAILED: $*" >&2
  exit 1
}
body() { sed '$d'; }
status() { tail -n 1; }

if [ "${RUNPOD_E2E_CAPACITY_CHECK:-}" = 1 ]; then
  stock=$(get '/catalog/gpus?include=AVAILABILITY&product=POD&cloud=SECURE' | body |
    GPU="$gpu" python3 -c 'import json, os, sys
print(next((g.get("availability") or "NONE" for g in json.load(sys.stdin)["gpus"] if g["id"] == os.environ["GPU"]), "NONE"))')
  echo "stock of $gpu: $stock"
  if [ "$stock" = NONE ]; then
    echo "skipped: RunPod has none now"
    exit 0
  fi
fi

kubectl wait --for=condition=Ready "node/$node" --timeout=60s >/dev/null || fail "node $node is not Ready: does Nebula run with $provider?"

tidy() {
  kubectl delete pod "$pod" -n "$namespace" --ignore-not-found --wait=false >/dev/null || true
  kubectl wait --for=delete "pod/$pod" -n "$namespace" --timeout=300s >/dev/null 2>&1 || true
  kubectl delete nodepool "$pool" --ignore-not-found --wait=false >/dev/null || true
  kubectl delete namespace "$namespace" --ignore-not-found --wait=false >/dev/null || true
}
trap tidy EXIT

kubectl create namespace "$namespace" --dry-run=client -o yaml | kubectl apply -f - >/dev/null
kubectl apply -f - >/dev/null <<YAML
apiVersion: nebula.inftyai.com/v1alpha1
kind: NodePool
metadata: {name: $pool}
spec:
  capacityTypes: [OnDemand]
  maxPrice: "$ceiling"
  providers: [{name: $provider}]
YAML
kubectl apply -n "$namespace" -f - >/dev/null <<YAML
apiVersion: v1
kind: Pod
metadata:
  name: $pod
  labels:
    nebula.inftyai.com/enabled: "true"
    nebula.inftyai.com/nodepool: $pool
    nebula.inftyai.com/accelerator-type: $kind
spec:
  containers:
  - name: smoke
    image: ${RUNPOD_E2E_IMAGE:-busybox:1.36}
    command: [sleep, infinity]
    resources: {limits: {nvidia.com/gpu: "1"}}
YAML
echo "waiting for the Pod, at most $timeout_s s"
kubectl wait --for=condition=Ready "pod/$pod" -n "$namespace" --timeout="${timeout_s}s" >/dev/null || {
  kubectl describe "pod/$pod" -n "$namespace" | sed -n '/^Conditions:/,$p' >&2
  fail "the Pod did not become Ready"
}

id=$(kubectl get pod "$pod" -n "$namespace" -o json | pick "it['metadata']['annotations'].get('nebula.inftyai.com/instance-id')")
[ -n "$id" ] || fail "the Pod names no machine"
answer=$(get "/pods/$id")
[ "$(status <<<"$answer")" = 200 ] || fail "RunPod does not know pod $id: $(body <<<"$answer")"
identity=$(body <<<"$answer" | pick "it['env'].get('NEBULA_IDENTITY')")
echo "RunPod has pod $id as ${identity:-nobody}, $(body <<<"$answer" | pick "it['status']"), \$$(body <<<"$answer" | pick "it['cost']") an hour"
[[ $identity == nb-* ]] || fail "pod $id does not carry our identity"
bound=$(kubectl get cloudpodbindings -n "$namespace" -o json | pick "[b['status'].get('phase') for b in it['items'] if b.get('status')]")
echo "its binding says $bound"
[ "$bound" = "['Bound']" ] || fail "Pod and binding do not agree"

echo "deleting the Pod"
kubectl delete pod "$pod" -n "$namespace" --timeout=300s >/dev/null
claims() { kubectl get nodeclaims -o json | pick "len([c for c in it['items'] if c['spec']['podRef']['namespace'] == '$namespace'])"; }
for _ in $(seq 150); do
  [ "$(claims)" = 0 ] && break
  sleep 2
done
[ "$(claims)" = 0 ] || fail "a NodeClaim is still there"

[ "$(get "/pods/$id" | status)" = 404 ] || fail "pod $id is still there: end it in the console"
cursor=
while :; do
  page=$(get "/pods?limit=1000$cursor")
  [ "$(status <<<"$page")" = 200 ] || fail "RunPod's list could not be read, so nothing is proven"
  left=$(body <<<"$page" | pick "[p['id'] for p in it['pods'] if p['env'].get('NEBULA_IDENTITY') == '$identity' or p['name'] == '$identity' or p['id'] == '$id']")
  [ "$left" = "[]" ] || fail "left over: $left: end them in the console"
  next=$(body <<<"$page" | pick "it.get('pagination', {}).get('nextCursor')")
  [ -n "$next" ] || break
  cursor="&cursor=$next"
done
echo "PASSED: rented, run, given back; nothing is left"

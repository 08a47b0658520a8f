"""Writes what is made from the chart: its README, and a manifest for people without Helm.

The README's table is the values file, comments included, so that neither can say what the other does not. The
manifest is the zero-value release without its CRDs, which lie in ``crds/``. ``--check`` compares.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from hack.cluster import binaries

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "chart"
README = CHART / "README.md"
MANIFEST = ROOT / "docs" / "install" / "nebula.yaml"
NAMESPACE = "nebula-system"

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):(?P<rest>.*)$")

_README = """\
# Helm chart of Nebula

{description}

Written by `python -m hack.chart`; [docs/install.md](../docs/install.md) says how to use it. Helm 3 and 4,
Kubernetes {kubernetes}. `helm show values` prints the same with its comments.

## Images

| image | used by |
|---|---|
{images}

## Values

| value | default | what it is |
|---|---|---|
{values}
"""
_MANIFEST = """\
# Nebula {version} without Helm: kubectl apply --server-side -f crds/ -f docs/install/nebula.yaml. Written by
# python -m hack.chart: change the chart instead. Bundled Postgres, no provider. Before you delete it, look
# whether something is rented: kubectl get nodeclaims must be empty (docs/install.md, Without Helm).
---
apiVersion: v1
kind: Namespace
metadata:
  name: {namespace}
  labels: {{pod-security.kubernetes.io/enforce: restricted}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value: its path, its default as YAML, and the comment above it (may be empty)."""

    path: str
    default: str
    words: str


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 where a file is stale.")
def main(check: bool) -> None:
    stale = []
    for path, text in written().items():
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            click.echo(f"wrote {path.relative_to(ROOT)}")
    if check and stale:
        raise click.ClickException(f"stale: {', '.join(map(str, stale))}: python -m hack.chart")


def written() -> dict[Path, str]:
    """What each file must hold."""
    return {README: readme(), MANIFEST: manifest()}


def readme() -> str:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    images = yaml.safe_load(about["annotations"]["artifacthub.io/images"])
    rows = [f"| `{each.path}` | `{each.default}` | {each.words} |" for each in values()]
    return _README.format(
        description=about["description"],
        kubernetes=about["kubeVersion"].removesuffix("-0").replace(">=", "from ").strip(),
        images="\n".join(f"| `{each['image']}` | {each['name']} |" for each in images),
        values="\n".join(rows),
    )


def values() -> list[Value]:
    """Every value of the chart, in the file's order."""
    text = (CHART / "values.yaml").read_text()
    return list(_values(text.splitlines(), yaml.safe_load(text)))


def manifest() -> str:
    """The release as plain objects. Hooks are left out: without Helm nobody would run them; and the Job that
    gives the backup's volume its first Pod for `helm install --wait`: nobody would take away those before it.

    Raises:
        RuntimeError: Helm refused; the message is its own.
    """
    helm = binaries.build(binaries.HELM) / "helm4"
    argv: list[str | Path] = [
        helm,
        "template",
        "nebula",
        CHART,
        "--namespace",
        NAMESPACE,
        "--no-hooks",
        "--skip-tests",
    ]
    argv += ["--set", "crds.install=false"]
    done = subprocess.run(
        [*argv, "--kube-version", binaries.kubernetes_version()], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    objects = re.sub(r"^# Source: .*\n", "", done.stdout, flags=re.MULTILINE)
    parts = [part for part in objects.split("\n---\n") if not re.search(r"^kind: Job$", part, re.MULTILINE)]
    objects = "\n---\n".join(parts)
    objects = objects.replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")
    for pattern in (r"^ *annotations:\n *helm\.sh/resource-policy: keep\n", r"^ *helm\.sh/chart: .*\n"):
        objects = re.sub(pattern, "", objects, flags=re.MULTILINE)
    return _MANIFEST.format(version=version, namespace=NAMESPACE) + objects


def _values(lines: list[str], tree: Mapping[str, Any]) -> Iterator[Value]:
    stack: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in lines:
        if line.strip().startswith("#"):
            comment.append(line.strip().lstrip("#").strip().removeprefix("-- "))
            continue
        match = _KEY.match(line)
        if match is None:
            comment = []
            continue
        while stack and stack[-1][0] >= len(match["indent"]):
            stack.pop()
        path = [key for _, key in stack] + [match["key"]]
        found: Any = tree
        for key in path:
            found = found[key]
        words, comment = " ".join(comment), []
        if isinstance(found, dict) and not match["rest"].split("#")[0].strip():
            stack.append((len(match["indent"]), match["key"]))
            if words:
                yield Value(path=".".join(path), default=" ", words=f"*{_cell(words)}*")
            continue
        default = yaml.safe_dump(found, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        yield Value(path=".".join(path), default=_cell(default), words=_cell(words))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(1)

"""The money of the demo: a scene of its own, and the bill at the end of every run."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from app.inventory.identity import parse
from hack.demo.endings import clear, pool_of, template
from hack.demo.stage import CLOUDS, NAMESPACE, Cloud, Stage

_DIGITS = Decimal(1).scaleb(-12)  # as many as the reports print
_SETTLED = ("matched", "rounding")


def bill(stage: Stage) -> None:
    """What all of it cost, in the ledger and in the clouds' own books: the same, to the last digit."""
    if any(cloud.alive() for cloud in stage.clouds.values()):
        return  # a scene that was kept running
    stage.say("The bill of all that, checked against the clouds' own meters.")
    stage.until("every machine's bill has come", lambda: _is_settled(stage), within_s=60)
    stage.show_nebula("cost", "--group-by", "provider", *_since())
    stage.show_nebula("cost", "--group-by", "workload,phase", *_since())
    stage.show_nebula("cost", "verify")
    said = nebula(stage, "cost", "--group-by", "provider", "-o", "json", *_since())
    ledger = {line["provider"]: Decimal(line["billedUSD"]) for line in said["lines"]}
    for cloud in _exact(stage):
        bills = [Decimal(machine["bill_usd"]) for machine in _ours(cloud)]
        true = sum(bills, Decimal(0)).quantize(_DIGITS)
        stage.check(
            f"{cloud.name}'s own meter says ${true}, and so does the ledger",
            ledger.get(cloud.name, Decimal(0)) == true,
        )


def cost(stage: Stage) -> None:
    """Reports while machines run: burn, cost by team, a Pod's receipt, a page."""
    stage.say("Two teams, one Deployment each: an L4 on modal, a T4 on aws.")
    stage.make(
        pool_of("modal-only", "modal"),
        pool_of("aws-only", "aws"),
        _deployment("vision", pool="modal-only", accelerator="L4"),
        _deployment("speech", pool="aws-only", accelerator="T4"),
    )
    stage.until("both run", lambda: len(stage.ready_on("modal")) == len(stage.ready_on("aws")) == 1)
    stage.until("both are in the ledger", lambda: len(nebula(stage, "burn", "-o", "json")["live"]) >= 2)
    stage.show_nebula("burn", "--chart")
    stage.show_nebula("cost", "--group-by", "team", "--chart", *_since())
    stage.say(
        "A budget for team vision, of which little is left. One for everything tells, and refuses nothing."
    )
    stage.show_nebula("budget", "set", "vision", "--amount", "0.001", "--period", "day", "--team", "vision")
    stage.show_nebula("budget", "set", "all", "--amount", "500")
    stage.show_nebula("budget")
    (pod,) = stage.ready_on("modal")
    stage.say("The receipt of a Pod that still runs.")
    stage.show_nebula("cost", "pod", pod["metadata"]["name"], "-n", NAMESPACE)
    file = Path(os.environ.get("REPORT") or "report.html").resolve()
    stage.say("All of it on one page.")
    stage.show_nebula("report", "--html", str(file), *_since())
    stage.check("the page is there", file.stat().st_size > 1000)
    stage.show("delete", "deployment/vision", "-n", NAMESPACE)
    clear(stage, "deployment/speech")


def nebula(stage: Stage, *args: str) -> Any:
    """What a command prints as JSON; it may say that something is wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *args],
        env={**os.environ, "NEBULA_DATABASE_URL": stage.database},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return json.loads(done.stdout)


def _is_settled(stage: Stage) -> bool:
    said = nebula(stage, "cost", "verify", "-o", "json")
    made = {cloud.name: len(_ours(cloud)) for cloud in _exact(stage)}
    settled = dict.fromkeys(made, 0)
    for row in said["bills"]:
        if row["provider"] in made and row["status"] in _SETTLED:
            settled[row["provider"]] += row["machines"]
    return not said["wrong"] and settled == made


def _ours(cloud: Cloud) -> list[dict[str, Any]]:
    """The machines that carry an identity of ours: a scene may have planted others."""
    return [machine for machine in cloud.machines() if parse(machine["name"]) is not None]


def _exact(stage: Stage) -> list[Cloud]:
    """Those that tell their bill at once; RunPod's has whole hours only, and comes when they are over."""
    return [cloud for name, cloud in stage.clouds.items() if CLOUDS[name] == "fake"]


def _since() -> tuple[str, str]:
    return ("--from", (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d"))


def _deployment(team: str, *, pool: str, accelerator: str) -> dict[str, Any]:
    made = template(pool, accelerator)
    made["metadata"]["labels"] |= {"team": team, "app": team}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": team},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": team}}, "template": made},
    }

"""``nebula simulate``: what can be started, and that starting it is all that imports it."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli.simulate import command
from tests.support.clouds import ROOT


def test_every_simulator_in_the_tree_is_a_subcommand():
    ours = {path.parent.name for path in (ROOT / "providers").glob("*/simulator.py")}

    shown = CliRunner().invoke(command, ["--help"]).output

    assert "fake" in ours
    assert [name for name in sorted(ours) if f"\n  {name} " not in shown] == []


def test_an_unknown_cloud_is_refused():
    result = CliRunner().invoke(command, ["nimbus", "--state", "x"])

    assert result.exit_code == 2
    assert "nimbus" in result.output


@pytest.mark.parametrize(
    ("text", "said"), [("offers: []", "offers: "), ("clouds: 3", "clouds: ")], ids=["empty", "unknown-field"]
)
def test_a_wrong_scenario_ends_it_with_the_field(tmp_path: Path, text: str, said: str):
    scenario = tmp_path / "bad.yaml"
    scenario.write_text(text)

    result = CliRunner().invoke(
        command, ["fake", "--scenario", str(scenario), "--state", str(tmp_path / "s")]
    )

    assert result.exit_code == 1
    assert said in result.output


def test_help_imports_no_simulator():
    code = (
        "import sys; from app.cli.simulate import command;"
        " command(['fake', '--help'], standalone_mode=False);"
        " sys.exit(bool({'providers.simulation.engine', 'uvicorn'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "--scenario" in done.stdout

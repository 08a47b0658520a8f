"""``nebula`` and ``kubectl nebula``: one command a module, imported only when it is called."""

import importlib

import click

# command -> module below this package, its command object, and the line that help shows
_COMMANDS = {
    "run": ("run", "command", "Run one replica of the controller."),
    "migrate": ("migrate", "command", "Bring the database to this version's schema."),
    "backup": ("backup", "backup", "Write the whole store into a file."),
    "restore": ("backup", "restore", "Put the store back to a file's state, and hold the sweeps."),
    "hold": ("hold", "group", "Show, and confirm, what holds the sweeps."),
    "blocks": ("blocks", "group", "Show and clear what placement avoids."),
    "offers": ("offers", "command", "Show what could be rented now, and for how much."),
    "catalog": ("catalog", "group", "Bring price lists up to date from the clouds."),
    "cost": ("cost", "group", "What was paid: reports, a Pod's receipt, an export, a check."),
    "budget": ("budget", "group", "Show, set and drop budgets."),
    "report": ("report", "command", "Write the money of a period on one page."),
    "burn": ("burn", "command", "What runs now costs an hour."),
    "why": ("why", "command", "Say why a Pod is placed where it is, or not at all."),
    "orphans": ("orphans", "group", "Show machines without an owner, and why; protect, adopt, forget."),
    "sweep": ("orphans", "sweep", "Show what would be ended, and with your word have it ended."),
    "setup": ("setup", "group", "Make what an installation needs once."),
    "uninstall": ("uninstall", "group", "Look after what is rented before an installation goes."),
    "selftest": (
        "selftest",
        "command",
        "Prove an installation from within: API, database, admission, a Pod.",
    ),
    "simulate": ("simulate", "command", "Run a simulated cloud on 127.0.0.1."),
}


class _Lazy(click.Group):
    """Help is answered without importing a single command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        found: click.Command = getattr(importlib.import_module(f"app.cli.{module}"), attribute)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in self.list_commands(ctx)])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nebula", prog_name="nebula")
def main() -> None:
    """GPUs from any cloud for any Pod, and a Postgres record of every machine and every paid second."""


def kubectl_main() -> None:
    """The plugin: kubectl runs ``kubectl-nebula`` for ``kubectl nebula``."""
    main(prog_name="kubectl nebula")


if __name__ == "__main__":
    main()

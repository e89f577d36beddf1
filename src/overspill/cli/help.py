"""`--help` in groups, as plain text: it pipes, and reads without colour."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from overspill.cli.options import OUTPUT


class GroupedCommand(TyperCommand):
    """Each option stands under its group (`rich_help_panel`); what every command has comes last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                otherwise = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or otherwise, []).append(record)
        for title in sorted(groups, key=lambda title: title in (OUTPUT, "Options")):
            with formatter.section(title):
                formatter.write_dl(groups[title], col_max=32)

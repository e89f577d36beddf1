"""`overspill audit`: what a vLLM or llama.cpp server's log says of its offload, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from overspill.audit import audit_log
from overspill.audit.process import measure
from overspill.audit.report import as_json, as_lines
from overspill.cli.progress import out
from overspill.errors import CheckpointError, ConfigError, VerdictError


def command(
    logs: Annotated[
        list[str], typer.Argument(metavar="LOG...", help="Logs of vLLM or llama.cpp; - is standard input.")
    ],
    pid: Annotated[
        int | None, typer.Option("--pid", metavar="N", help="The server's process: its memory is held against the log.")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Machine-readable output on stdout, an object per server and line.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> None:
    """Say what a server was asked to offload, what it did, and what is wrong."""
    if logs.count("-") > 1:
        raise ConfigError("standard input (-) was given twice", hint="it can be read once")
    if pid is not None and len(logs) > 1:
        raise ConfigError(
            f"--pid {pid} was given with {len(logs)} logs", hint="a process belongs to one log: audit them one by one"
        )
    memory = measure(pid) if pid is not None else None
    wrong: dict[str, int] = {}
    unread: list[CheckpointError] = []
    for name in logs:
        try:
            audits = audit_log(name, memory=memory)
        except CheckpointError as error:
            unread.append(error)
            continue
        for audit in audits:
            if json_output:
                print(json.dumps(as_json(audit)), flush=True)
            else:
                for line in as_lines(audit):
                    out.print(line, highlight=False, markup=False)
        found = sum(len(audit.wrong) for audit in audits)
        if found:
            wrong[name] = found
    total = sum(wrong.values())
    told = f"{total} finding{'s' if total > 1 else ''} in {', '.join(wrong)}"
    if unread:
        raise CheckpointError(
            "; ".join([*(error.message for error in unread), *([told] if wrong else [])]), hint=unread[0].hint
        )
    if wrong:
        raise VerdictError(told, hint="what to do stands beside each; notes alone end with exit code 0")

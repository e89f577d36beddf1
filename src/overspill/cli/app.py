"""The entry point: arguments in, a command, and every error told as one message with its exit code."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import traceback
import warnings
from importlib import metadata
from typing import Annotated, Any, TextIO

import typer

import overspill
from overspill.cli import audit, bench, cache, compare, plan, run, serve, support
from overspill.cli.arguments import LISTS, normalise
from overspill.cli.help import GroupedCommand
from overspill.errors import ConfigError, DefectError, OverspillError, OverspillWarning

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of click, which newer typers carry inside
INTERRUPTED, READER_GONE = 128 + signal.SIGINT, 128 + signal.SIGPIPE  # as shells have it

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-"), "max_content_width": 110},
)
app.command("plan", cls=GroupedCommand)(plan.command)
app.command("run", cls=GroupedCommand)(run.command)
app.command("serve", cls=serve.ServeCommand, short_help="Answer OpenAI's API, and show a live page.")(serve.command)
app.command("compare", cls=GroupedCommand, short_help="Run with and without the offload, and judge.")(compare.command)
app.command("audit", short_help="Read the log of a vLLM or llama.cpp server.")(audit.command)
app.command("bench", short_help="Measure this machine, for planning.")(bench.command)
app.command("support", short_help="Show which architectures run, and how.")(support.command)
app.add_typer(cache.app, name="cache")


def _version(asked: bool) -> None:
    if asked:
        parts = " ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
        print(f"overspill {overspill.__version__} ({parts} Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Run language models whose weights do not fit the device, and prove what happened."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process with the exit code of errors.py."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    _set_up_logs(debug)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal does not know is no error
    sys.exit(_run(arguments or ["--help"], debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        with typer.main.get_command(app).make_context("overspill", normalise(arguments)) as context:
            context.command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except OverspillError as error:
        return _tell(error, debug)
    except UsageError as error:
        return _tell(_refusal(error, arguments), debug)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone; it is no success, and no verdict either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception as error:  # nothing the caller did: told as our defect
        defect = DefectError(
            f"{type(error).__name__}: {error}", hint="this is a defect; --debug shows where. Please report it"
        )
        defect.__cause__ = error
        return _tell(defect, debug)
    return 0


def _refusal(error: Any, arguments: list[str]) -> ConfigError:
    """click's refusal of the arguments in our words."""
    command = error.ctx.command_path if error.ctx is not None else "overspill"
    hint = f"`{command} --help` lists what is accepted"
    if any(argument.replace("_", "-") in LISTS for argument in arguments):
        hint += "; a list of names runs to the next option, so MODEL stands before it"
    return ConfigError(error.format_message().rstrip("."), hint=hint)


def _tell(error: OverspillError, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _set_up_logs(debug: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("overspill")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if debug else "error")  # before it is imported

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, OverspillWarning):
            logger.warning("warning: %s", message)
        elif debug:
            logger.debug("%s:%s: %s: %s", filename, lineno, category.__name__, message)

    warnings.showwarning = show

"""The entry point: arguments in, a command, and every error told as one message with its exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from typing import TextIO

import typer

from overspill.cli import compare, plan, run
from overspill.cli.arguments import normalise
from overspill.errors import ConfigError, DefectError, OverspillError, OverspillWarning

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of click, which newer typers carry inside

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run language models whose weights do not fit the device, and prove what happened.",
)
app.command("plan")(plan.command)
app.command("run")(run.command)
app.command("compare")(compare.command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process with the exit code of errors.py."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    _set_up_logs(debug)
    sys.exit(_run(normalise(arguments), debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        app(arguments, prog_name="overspill", standalone_mode=False)
    except OverspillError as error:
        return _tell(error, debug)
    except UsageError as error:
        return _tell(
            ConfigError(str(getattr(error, "message", error)), hint="overspill COMMAND --help lists what is accepted"),
            debug,
        )
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone
        return 0
    except Exception as error:  # nothing the caller did: told as our defect
        defect = DefectError(
            f"{type(error).__name__}: {error}", hint="this is a defect; --debug shows where. Please report it"
        )
        defect.__cause__ = error
        return _tell(defect, debug)
    return 0


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

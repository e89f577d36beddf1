"""The logs of these tests, and how a changed one is audited."""

from __future__ import annotations

from pathlib import Path

from overspill.audit import Audit, Finding, audit_log

LOGS = Path(__file__).with_name("logs")


def audited(name: str) -> Audit:
    (audit,) = audit_log(str(LOGS / f"{name}.log"))
    return audit


def text_of(name: str) -> str:
    return (LOGS / f"{name}.log").read_bytes().decode()


def audit_text(text: str, folder: Path) -> Audit:
    (audit,) = audits_of(text, folder)
    return audit


def audits_of(text: str, folder: Path) -> list[Audit]:
    path = folder / "changed.log"
    path.write_bytes(text.encode())
    return audit_log(str(path))


def the(audit: Audit, id_: str) -> Finding:
    (found,) = [finding for finding in audit.findings if finding.id == id_]
    return found


def ids(audit: Audit) -> dict[str, str]:
    return {finding.id: finding.severity for finding in audit.findings}


def under(prefix: str, text: str) -> str:
    """The log as a container's runtime shows it."""
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def with_line(name: str, after: str, *lines: str) -> str:
    """A log with lines after the first that has `after` in it."""
    held = text_of(name).splitlines()
    begin = next(number for number, line in enumerate(held, 1) if after in line)
    return "\n".join([*held[:begin], *lines, *held[begin:], ""])

"""The logs of these tests, and how a changed one is audited."""

from __future__ import annotations

from pathlib import Path

from overspill.audit import Audit, Finding, audit_log

LOGS = Path(__file__).with_name("logs")


def audited(name: str) -> Audit:
    return audit_log(str(LOGS / f"{name}.log"))


def text_of(name: str) -> str:
    return (LOGS / f"{name}.log").read_bytes().decode()


def audit_text(text: str, folder: Path) -> Audit:
    path = folder / "changed.log"
    path.write_bytes(text.encode())
    return audit_log(str(path))


def the(audit: Audit, id_: str) -> Finding:
    (found,) = [finding for finding in audit.findings if finding.id == id_]
    return found


def ids(audit: Audit) -> dict[str, str]:
    return {finding.id: finding.severity for finding in audit.findings}

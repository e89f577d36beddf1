"""An audit as lines for people, and as JSON for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from overspill.audit.records import Audit, Finding, Value


def as_json(audit: Audit) -> dict[str, object]:
    return {
        "log": audit.log,
        "server": audit.server,
        "engine": audit.engine,
        "version": audit.version,
        "starts": audit.starts,
        "asked": dict(audit.asked),
        "happened": dict(audit.happened),
        "findings": [
            {
                "id": finding.id,
                "severity": finding.severity,
                "evidence": [{"line": line.number, "text": line.quoted} for line in finding.evidence],
                "why": finding.why,
                "remedy": finding.remedy,
            }
            for finding in audit.findings
        ],
        "unjudged": list(audit.unjudged),
    }


def as_lines(audit: Audit) -> Iterator[str]:
    name = "standard input" if audit.log == "-" else audit.log
    engine = f"{audit.engine} {audit.version or '(version not shown)'}" if audit.engine else "engine not known"
    yield f"{name}{f', {audit.server}' if audit.server is not None else ''}: {engine}"
    if audit.starts > 1:
        yield f"  {audit.starts} starts in the log; this is the last"
    if audit.engine is not None:
        yield f"  asked     {_settings(audit.asked) or 'nothing that the log shows'}"
        yield f"  happened  {_settings(audit.happened)}"
    for finding in audit.findings:
        yield from _finding(finding)
    for missing in audit.unjudged:
        yield f"  not judged: {missing}"
    yield f"  {verdict(audit)}"


def verdict(audit: Audit) -> str:
    counts = {name: sum(one.severity == name for one in audit.findings) for name in ("error", "warning", "note")}
    told = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
    return ", ".join(told) if told else "nothing wrong in what the log shows"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"  {finding.severity} [{finding.id}]"
    for line in finding.evidence:
        yield f"    {f'line {line.number}' if line.number is not None else 'now'}: {line.quoted}"
    yield f"    why: {finding.why}"
    yield f"    do:  {finding.remedy}"


def _settings(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)

"""Reads the log of a vLLM or llama.cpp server, and says what was asked, what happened and what is wrong."""

from __future__ import annotations

from overspill.audit import (
    llama_findings,
    llama_log,
    process,
    summary,
    vllm_facts,
    vllm_findings,
    vllm_log,
    vllm_memory,
    vllm_prefetch,
)
from overspill.audit.lines import lines_of, opened
from overspill.audit.llama_facts import host_mib
from overspill.audit.process import ProcessMemory
from overspill.audit.records import Audit, Facts, Finding, Line, Value
from overspill.audit.scan import Scan, scan
from overspill.errors import ConfigError

__all__ = ["Audit", "Finding", "Line", "audit_log"]

VLLM_PARTS = (vllm_findings, vllm_prefetch, vllm_memory)
_SEVERITIES = ("error", "warning", "note")


def audit_log(name: str, *, memory: ProcessMemory | None = None) -> list[Audit]:
    """The verdicts on the servers that wrote to the log `name` ("-" for stdin), at least one.

    With the memory of the process of the only one, where that is given. CheckpointError where the log cannot be read,
    ConfigError where the memory is given and several servers are in the log.
    """
    with opened(name) as text:
        servers = scan(lines_of(text), (vllm_log.ENGINE, llama_log.ENGINE))
    if memory is not None and len(servers) > 1:
        raise ConfigError(
            f"--pid {memory.pid} was given, and {len(servers)} servers wrote to {name}",
            hint="give the log of that process alone (docker compose logs SERVICE, kubectl logs POD)",
        )
    if not servers:
        return [_unknown(name)]
    return [_verdict(name, one, one.source or None if len(servers) > 1 else None, memory) for one in servers]


def _verdict(name: str, server: Scan, source: str | None, memory: ProcessMemory | None) -> Audit:
    facts, is_vllm = server.facts, server.engine is vllm_log.ENGINE
    if is_vllm:
        findings = [one for part in VLLM_PARTS for one in part.findings(facts)]
        happened, unjudged = summary.vllm(facts), summary.vllm_unjudged(facts)
    else:
        findings = [*llama_findings.findings(facts)]
        happened, unjudged = summary.llama(facts), summary.llama_unjudged(facts)
    if memory is not None:
        findings += process.findings(memory, *_offloaded(facts, is_vllm))
        happened |= _measured(memory)
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    asked = {setting: held.value for setting, held in facts.asked.items()}
    engine = server.engine.name
    return Audit(name, source, engine, facts.version, asked, happened, tuple(findings), unjudged, facts.starts)


def _unknown(name: str) -> Audit:
    nothing = Finding(
        "nothing-to-judge",
        "warning",
        (),
        "no line of this log is one of vLLM's or llama.cpp's that tells of weights or memory, so nothing can be "
        "said of it.",
        "give the server's own output from its start (both stdout and stderr), of vLLM 0.27 to 0.33 or llama.cpp",
    )
    return Audit(name, None, None, None, {}, {}, (nothing,), (), 0)


def _offloaded(facts: Facts, is_vllm: bool) -> tuple[float, list[Line]]:
    """Bytes that all ranks hold on the host as the log counts them, and the line that says so."""
    if is_vllm:
        hit = facts.last("uva_bytes") or facts.last("prefetch")
        nbytes = vllm_facts.host_gib(facts) * vllm_facts.ranks(facts) * vllm_facts.GIB
        return nbytes, [hit.line] if hit is not None else []
    return host_mib(facts) * 1024**2, [hit.line for hit in facts.all("weights")[-1:]]


def _measured(memory: ProcessMemory) -> dict[str, Value]:
    told: dict[str, Value] = {f"process.{name}_bytes": nbytes for name, nbytes in memory.fields.items()}
    told["process.count"] = memory.processes
    if memory.limit_bytes is not None and memory.used_bytes is not None:
        told |= {"cgroup.limit_bytes": memory.limit_bytes, "cgroup.used_bytes": memory.used_bytes}
    return told

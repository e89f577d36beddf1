"""What Docker, Compose, Kubernetes, the journal and llama.cpp's router put in front of a server's lines."""

from __future__ import annotations

import json
import re

_STAMP = r"\d{4}-\d\d-\d\dT\d[\d:.,]{5,20}(?:Z|[+-]\d\d:?\d\d)? "
_NAME = r"[\w.@/-]{1,64}"
_PREFIX = re.compile(
    r"(?P<service>[A-Za-z][\w.-]{0,100})\s{1,60}\|(?: |$)"
    r"|\[pod/(?P<pod>[^\]\s]{1,200})\] "
    r"|\[ {0,4}(?P<port>\d{2,5})\] "
    rf"|{_STAMP}(?:(?:stdout|stderr) [FP] |\S{{1,64}} (?P<stamped>{_NAME})\[\d{{1,9}}\]: )?"
    rf"|[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d \S{{1,64}} (?P<program>{_NAME})(?:\[\d{{1,9}}\])?: "
)
_NESTED = 4
_MACHINE = {"kernel", "systemd", "systemd-oomd", "dockerd", "containerd", "podman"}
"""Programs whose lines tell of others."""


def unwrapped(text: str) -> tuple[str, str]:
    """Who wrote a line (a container, a pod, a program, a router's child; "" where it does not say), and the line."""
    if text.startswith('{"'):
        text = _of_json(text)
    container = child = ""
    for _ in range(_NESTED):
        match = _PREFIX.match(text)
        if match is None:
            break
        name = next((held for key, held in match.groupdict().items() if held and key != "port"), "")
        if name and container:
            break  # a table's cell
        container = container or ("" if name in _MACHINE else name)
        child = f" [{match['port']}]" if match["port"] else child
        text = text[match.end() :]
    return (container + child).strip(), text


def router_of(source: str) -> str | None:
    """The source of the router whose child this is."""
    name, bracket, _ = source.rpartition("[")
    return name.strip() if bracket else None


def _of_json(text: str) -> str:
    """The line in an object of Docker's json-file driver; what is none as it is."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return text
    line = held.get("log") if isinstance(held, dict) else None
    return line.rstrip("\r\n") if isinstance(line, str) else text

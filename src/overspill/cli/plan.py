"""`overspill plan`: what would be where, from headers alone."""

from __future__ import annotations

import json

from overspill.cli.options import MODEL, Shared, shared_options
from overspill.cli.progress import out


@shared_options
def command(model: MODEL, *, shared: Shared) -> None:
    """Say what would go where and what it takes; no weight is read."""
    settings = shared.settings()
    from overspill.api import prepare
    from overspill.plan.report import plan_as_json, render_plan

    plan = prepare(model, settings).plan
    if shared.json_output:
        print(json.dumps(plan_as_json(plan)))
    else:
        out.print(render_plan(plan))

"""`probe` of files and names: what was seen, drawn and judged."""

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from cost_models.records import write_atomic
from executor.cli.outcome import Outcome

if TYPE_CHECKING:
    from planner.readers.topology.join import Joined


def probe_seen(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Outcome:
    """The cluster of the files and names; `-o` draws it (FILE.png) or writes the document, which `--cluster` reads."""
    from planner.errors import NoDeviceError
    from planner.fabric_findings import findings
    from planner.readers.clusters import read_joined
    from planner.report.fabric_text import fabric_text
    from planner.report.probe_text import probe_text
    from planner.survey import is_bare, survey_document

    said = [*arguments.cluster, *([f"gpu={arguments.gpu}"] if arguments.gpu is not None else [])]
    try:
        seen = read_joined(said)
    except NoDeviceError as error:
        if arguments.out is not None:  # a file that is written is a cluster, or draws one
            raise
        return _structure(read_joined([*said, f"gpu={error.stand_in}"]), str(error))
    found = findings(seen)
    document = survey_document(seen, found)
    if arguments.out is not None:
        if arguments.out.lower().endswith(".png"):
            from planner.report.fabric_plot import fabric_plot

            fabric_plot(seen, found, arguments.out)
        else:
            write_atomic(arguments.out, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
        progress(f"wrote {arguments.out}")
    if is_bare(seen) and not found:
        return Outcome(document=document, text=lambda: probe_text(seen.cluster))
    return Outcome(document=document, text=lambda: f"{probe_text(seen.cluster)}\n\n{fabric_text(seen, found)}")


def _structure(seen: "Joined", missing: str) -> Outcome:
    """What files tell that do not name the GPU."""
    from planner.fabric_findings import findings
    from planner.report.fabric_text import structure_text
    from planner.survey import structural, structure_document

    found = structural(findings(seen))
    document = structure_document(seen, found, missing)
    return Outcome(document=document, text=lambda: structure_text(seen, found, missing))

"""Which of Penstock's own runs a trace is of, and where their results are: each run names itself in it."""

from penstock.trace.questions.events_view import EventsView


def describe_runs(events: EventsView) -> list[str]:
    """A sentence for each run that these events name, in the order of their starts."""
    rows = events.ask("""
        SELECT json_extract_string(args, '$.run') AS traced, json_extract_string(args, '$.results') AS results
        FROM {events} WHERE cat = 'run' AND name = 'run' AND traced IS NOT NULL AND results IS NOT NULL
        GROUP BY ALL ORDER BY min(ts_us), traced""")
    return [f"Trace of the run {run}; its results: {results}" for run, results in rows]

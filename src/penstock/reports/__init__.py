"""Reports: findings of a run, a probe or a comparison as plain data, and the one renderer that draws them.

Callers return a `Report` and draw nothing: only the renderer deals with ticks, scales, SVG and CSS.

    from penstock.reports.page import write_report
    from penstock.reports.report import Banner, Chart, Kind, Look, Report, Section, Series, table_section

    report = Report(
        title="Training run 7",
        subtitle="4 ranks on node-1",
        banner=Banner(
            verdict="failed", look=Look.BAD, figure="AU 71 %, 90 % required",
            limited_by="storage", since="epoch 2, step 40", to_do="Raise reader.read_threads.",
        ),
        highlights=[
            Chart(
                kind=Kind.BARS, title="AU of each epoch", run="run-7", unit="%",
                names=["1", "2"], series=[Series(y=[92.0, 50.0])], limits={"required 90 %": 90.0},
            ),
        ],
        sections=[
            Section(title="Throughput", text=["Bytes that steps received."], charts=[...]),
            table_section("epochs", "Epochs", [{"epoch": "1", "AU %": "92.00"}], bars="AU %"),
        ],
    )
    write_report(report, Path("report.html"))

Colors follow names: every chart, series or cell with the same `run` has the same hue, on every page. A page
loads nothing, so it can be mailed and printed; it works on phones and in dark mode.

`report` has the model, `drawing` turns a chart into shapes and ticks, `page` renders and writes.
"""

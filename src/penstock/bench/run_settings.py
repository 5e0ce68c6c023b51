"""The settings that all benchmark runs share: the folder of results, the record, and DLIO's files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.cluster.comm import Comm
from penstock.cluster.gates.preflight import PreflightResult
from penstock.environment import Environment
from penstock.progress import Progress
from penstock.results import event_files, provenance
from penstock.results.active_run import ActiveRun
from penstock.results.dlio_files import HYDRA_FOLDER, DlioOutputs, HydraFacts, write_dlio_files, write_iostat
from penstock.results.phase_figures import PhaseFigures
from penstock.results.run_record import RunRequest
from penstock.results.step_events import RankEvents
from penstock.workload.enums import Profiler
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run that do not depend on what it measures.

    A folder for the run is made in `results`, unless `run_folder` names the folder itself. `overrides` are in
    DLIO's words; `hydra_subfolder` and `log_before` belong to DLIO's files: where the configuration goes ("":
    nowhere), and the log's lines about what came before the run. `facts_of` reads the facts of a rank's host;
    `inspection` is the result of the preflight gates, None if none ran.
    """

    results: Path
    command: Sequence[str] = ()
    environment: Environment = field(default_factory=dict)
    overrides: Sequence[str] = ()
    remarks: Sequence[str] = ()
    run_folder: Path | None = None
    hydra_subfolder: str = HYDRA_FOLDER
    log_before: Sequence[str] = ()
    facts_of: provenance.ReadHostFacts = provenance.read_host
    inspection: PreflightResult | None = None

    @contextmanager
    def open_run(
        self,
        workload: Workload,
        *,
        comm: Comm,
        seeds: Mapping[str, int],
        plan: Mapping[str, Any],
        remarks: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Iterator[tuple[ActiveRun | None, Path]]:
        """Make the run's folder with its record, where `progress` can be followed. Collective.

        All ranks get the folder, and rank 0 the run, which ends with the block.
        """
        hosts = provenance.unique_hosts(comm.gather(self.facts_of(comm.host), awaiting="facts of all hosts"))
        request = RunRequest(
            workload=workload,
            ranks=comm.size,
            hosts=hosts,
            command=self.command,
            environment=self.environment,
            seeds=seeds,
            preflight=self.inspection.preflight if self.inspection else None,
            cluster=self.inspection.cluster if self.inspection else None,
            plan=plan,
            remarks=(*self.remarks, *remarks),
        )
        with ExitStack() as resources:
            run = None
            if comm.rank == 0:
                run = resources.enter_context(self._start(request))
                if progress is not None:
                    run.show_in_folder(progress)
            yield run, comm.broadcast(run.folder if run else None, awaiting="the folder of the run")

    def _start(self, request: RunRequest) -> ActiveRun:
        if self.run_folder is not None:
            return ActiveRun.start_in(self.run_folder, request, results=self.results)
        return ActiveRun.start(self.results, request)

    def write_dlio_files(
        self,
        run: ActiveRun,
        workload: Workload,
        *,
        events: Sequence[RankEvents] | None = None,
        train: PhaseFigures | None = None,
        evaluation: PhaseFigures | None = None,
        preparation: Sequence[str] = (),
    ) -> None:
        """Write the outputs and the configuration that DLIO would leave in the run's folder.

        The run's counters have been gathered before: `iostat.json` is made of them.
        """
        profiling = workload.profiling
        if workload.workflow.profiling and profiling.profiler is Profiler.IOSTAT:
            write_iostat(run.folder, run.record.hosts[0], profiling.iostat_devices)
        write_dlio_files(
            run.folder,
            DlioOutputs(
                workload=workload,
                ranks=event_files.read_events(run.folder) if events is None else events,
                hosts=run.record.hosts,
                started=datetime.fromisoformat(run.record.started_at),
                ended=datetime.now(UTC),
                train=train,
                evaluation=evaluation,
                preparation=preparation,
            ),
            HydraFacts(
                workload_name=workload.full_name,
                overrides=provenance.redact(self.overrides),
                subfolder=self.hydra_subfolder,
                working_folder=str(Path.cwd()),
                run_folder=str(run.folder),
            ),
            log_before=self.log_before,
        )

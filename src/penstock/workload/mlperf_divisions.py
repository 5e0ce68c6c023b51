"""The keys that the divisions of MLPerf Storage let a training run change, for runs and checks. Pure.

A key that no set names is forbidden, so a key that a later edition adds is refused until its rule is added
here.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Final

from penstock.errors import UsageError
from penstock.workload.dlio_keys import canonical_path
from penstock.workload.settings import dotted
from penstock.workload.spec import KeyPath


class SubmissionDivision(StrEnum):
    """The division in which a result is compared: `closed` fixes the workload, `open` lets it be adapted."""

    CLOSED = "closed"
    OPEN = "open"


CLOSED_KEYS: Final = frozenset(
    {
        "dataset.num_files_train",
        "dataset.num_subfolders_train",
        "dataset.data_folder",
        "reader.read_threads",
        "reader.computation_threads",
        "reader.transfer_size",
        "reader.prefetch_size",
        "reader.odirect",
        "storage.storage_root",
        "storage.storage_type",
        "storage.storage_options.prefetch_window",
        "checkpoint.checkpoint_folder",
    }
)
"""The keys that rule 3.6.2 allows to change."""

OPEN_KEYS: Final = CLOSED_KEYS | {
    "framework",
    "dataset.format",
    "dataset.num_samples_per_file",
    "reader.data_loader",
}
"""The keys that rule 3.6.3 allows to change."""

PLACE_KEYS: Final = frozenset(
    {
        "dataset.skip_listing",
        "dataset.listing_validation_interval",
        "dataset.num_files_generated",
        "dataset.total_disk_bytes",
        "storage.storage_library",
        "storage.storage_options.endpoint_url",
        "storage.storage_options.access_key_id",
        "storage.storage_options.secret_access_key",
        "storage.storage_options.region",
        "storage.storage_options.uri_scheme",
        "storage.storage_options.s3_force_path_style",
    }
)
"""Keys for where data is and how it is found. Tools set them, so they never count as a change."""

ODIRECT_WORKLOADS: Final = frozenset({"unet3d"})
"""The workloads whose reader can bypass the page cache in the reference implementation."""

RULES: Final = {SubmissionDivision.CLOSED: "3.6.2", SubmissionDivision.OPEN: "3.6.3"}
_ALLOWED: Final = {SubmissionDivision.CLOSED: CLOSED_KEYS, SubmissionDivision.OPEN: OPEN_KEYS}


def describe_breach(rule: str, key: str, why: str) -> str:
    """Describe in a sentence a change that a rule forbids."""
    return f"{key} {why} (rule {rule})"


def find_breaches(
    division: SubmissionDivision, changed: Iterable[KeyPath], *, workload: str
) -> tuple[str, ...]:
    """Return the changed keys that a division forbids, for a workload of the family `workload`."""
    allowed = _ALLOWED[division] | PLACE_KEYS
    rule = RULES[division]
    breaches = []
    for key in dict.fromkeys(dotted(canonical_path(path)) for path in changed):
        if key not in allowed:
            why = f"must stay as it is in the {division.value} division"
            breaches.append(describe_breach(rule, key, why))
        elif key == "reader.odirect" and workload not in ODIRECT_WORKLOADS:
            breaches.append(describe_breach(rule, key, f"is for {', '.join(ODIRECT_WORKLOADS)} alone"))
    return tuple(breaches)


def require_allowed(division: SubmissionDivision, changed: Iterable[KeyPath], *, workload: str) -> None:
    """Raise `UsageError` with every forbidden key and its rule."""
    if breaches := find_breaches(division, changed, workload=workload):
        free = ", ".join(sorted(_ALLOWED[division]))
        raise UsageError(
            "; ".join(breaches),
            where=f"--{division.value}",
            fix=f"Leave these out. You may change: {free}.",
        )


def choose_reading(
    division: SubmissionDivision | None,
    workload: str,
    changed: Iterable[KeyPath],
    *,
    families: Collection[str],
    loader: str | None,
    remainder: str | None,
) -> tuple[str, str]:
    """Return a run's loader and handling of remainders: as requested, as prescribed, or the default.

    Raises `UsageError` if the workload is not one of the shipped `families`, or if the division does not
    allow its changed keys. The closed division prescribes torch's loader and drops remainders. The default is
    Penstock's own loader, which leaves no sample out of two epochs in a row.
    """
    if division is not None:
        family = workload if workload in families else workload.rpartition("_")[0]
        if family not in families:
            raise UsageError(
                f"{workload} is not a shipped workload, and the {division.upper()} division allows no other "
                f"(rule {RULES[division]})",
                where=f"--{division}",
                fix="`penstock workloads` lists them.",
            )
        require_allowed(division, changed, workload=family)
    if division is not SubmissionDivision.CLOSED:
        return loader or "native", remainder or "rotate"
    for name, given, prescribed in (("--loader", loader, "pytorch"), ("--remainder", remainder, "drop")):
        if given not in (None, prescribed):
            raise UsageError(
                f"The CLOSED division requires {name} {prescribed}, not {given} (rule 3.6.2)",
                where=name,
                fix=f"Leave {name} out, or run without --closed.",
            )
    return "pytorch", "drop"

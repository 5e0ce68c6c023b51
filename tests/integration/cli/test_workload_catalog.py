"""`penstock workloads` for people: families, and the values of one workload."""

from tests.support.command_line import run_command


def test_list_has_a_line_for_each_accelerator() -> None:
    lines = run_command("workloads").stdout.splitlines()
    place = lines.index("unet3d")
    assert lines[place + 1].startswith("  3D U-Net")
    assert lines[place + 4].startswith("  h100   168 npz files x 1 sample x 140 MiB, batch 7, 323 ms a step")
    assert any("x 4,718,592 samples x" in line for line in lines)
    assert any(line.startswith("  any    ") for line in lines)


def test_values_of_one_workload_are_listed_and_long_lists_are_counted() -> None:
    shown = run_command("workloads", "unet3d", "--accelerator", "h100", "--set", "reader.batch_size=14")
    assert shown.returncode == 0
    assert ["reader.batch_size", "14"] in [line.split() for line in shown.stdout.splitlines()]
    long = run_command("workloads", "dlrm_b200")
    assert " entries" in long.stdout
    document = run_command("workloads", "dlrm_b200", "--json").document
    assert len(document["workload"]["dataset"]["parquet"]["columns"]) > 10
    assert document["accelerator"] == "b200"

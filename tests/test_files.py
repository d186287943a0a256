"""Every file that is shipped can be read, and says where its figures come from."""

import subprocess
from pathlib import Path

import pytest

from planner.arguments import dtype_bytes
from planner.cluster import configs_folder, default_cluster, read_cluster, read_gpu, shipped_gpu
from planner.errors import FileFormatError, PlannerError, UsageError
from planner.local_cluster import local_cluster
from planner.model_profile import read_profile

GPUS = sorted(path.stem for path in (configs_folder() / "gpus").iterdir())
CLUSTERS = sorted(path.stem for path in (configs_folder() / "clusters").iterdir())


@pytest.mark.parametrize("name", GPUS)
def test_gpu_files(name: str) -> None:
    gpu = read_gpu(name)
    assert gpu.name == name
    assert 8e9 <= gpu.memory <= 400e9
    assert 100e9 <= gpu.memory_bandwidth <= 20e12
    assert gpu.peak_flops["float32"] <= gpu.peak_flops["float16"]
    assert all(dtype_bytes(dtype) > 0 for dtype in gpu.peak_flops)
    assert all(1e12 <= rate <= 1e16 for dtype, rate in gpu.peak_flops.items() if dtype != "float64")
    assert 0 < gpu.matmul_efficiency <= 1
    assert "NVIDIA" in gpu.source
    assert shipped_gpu(gpu.device_name) == name


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_files(name: str) -> None:
    cluster = read_cluster(name)
    assert cluster.num_gpus == 8
    assert cluster.source
    assert cluster.intra_node.bandwidth >= cluster.inter_node.bandwidth
    assert cluster.intra_node.latency <= cluster.inter_node.latency
    assert all(cluster.memory_reserve < gpu.memory / 4 for gpu in cluster.gpus.values())


@pytest.mark.parametrize("num_gpus", [0, -1, 10**7, 10**30])
def test_numbers_of_gpus_that_no_cluster_has(num_gpus: int) -> None:
    for make in (lambda number: default_cluster(number, GPUS[0]), local_cluster):
        with pytest.raises(UsageError, match="1 to 1000000"):
            make(num_gpus)


def test_every_gpu_can_be_planned_for_by_its_name() -> None:
    assert GPUS == CLUSTERS
    for name in GPUS:
        assert default_cluster(3, name).num_gpus == 3
        assert [group.gpus_per_node for group in default_cluster(20, name).node_groups] == [8, 4]
        assert default_cluster(16, name).node_at(15) == 1


def test_shipped_profiles(repository: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "profiles/*.json"], cwd=repository, capture_output=True, text=True, timeout=60, check=False
    )
    if listed.returncode != 0:
        pytest.skip("which profiles are shipped is known from git, and this is no clone")
    for name in listed.stdout.split():
        assert read_profile(repository / name).layers


def cluster_text(**changes: str) -> str:
    values = {"reserve": '"1GiB"', "bandwidth": '"10GB/s"', "extra": ""} | changes
    return f"""
memory_reserve = {values["reserve"]}
{values["extra"]}
[[node_groups]]
count = 1
gpus_per_node = 8
gpu = "h100-sxm"
[intra_node]
bandwidth = {values["bandwidth"]}
latency = "5us"
[inter_node]
bandwidth = "5GB/s"
latency = "9us"
"""


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"extra": 'memory_reserved = "1GiB"'}, "unknown key 'memory_reserved'", "did you mean 'memory_reserve'?"),
        ({"bandwidth": "10"}, "'intra_node.bandwidth': bandwidth 10 has no unit", ""),
        ({"bandwidth": '"10"'}, "bandwidth '10' has no unit; write it like '450GB/s'", ""),
        ({"reserve": '"-1GiB"'}, "must be finite and not negative", ""),
        ({"reserve": "="}, "not TOML", "cluster"),
        ({"bandwidth": '"0GB/s"'}, "'intra_node.bandwidth'", "correct"),
        ({"bandwidth": '"1e300GB/s"'}, "'intra_node.bandwidth'", "correct"),
        ({"bandwidth": '"1e400GB/s"'}, "must be finite", "correct"),
        ({"reserve": '"1e300GB"'}, "'memory_reserve'", "correct"),
        ({"extra": "speed_fraction = 0"}, "'speed_fraction'", "correct"),
        ({"extra": "speed_fraction = true"}, "'speed_fraction': not a number", "correct"),
        ({"extra": f"x = {'[' * 5000}"}, "not TOML: nested too deeply", "cluster"),
    ],
)
def test_bad_cluster_files(tmp_path: Path, changes: dict[str, str], message: str, hint: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cluster_text(**changes))
    with pytest.raises(FileFormatError) as caught:
        read_cluster(str(path))
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory", '"0GB"'),
        ("memory", '"1e25GB"'),
        ("memory_bandwidth", '"0GB/s"'),
        ("peak_flops.float32", '"0TFLOP/s"'),
        ("matmul_efficiency", "0"),
        ("matmul_efficiency", "1.5"),
        ("memory_efficiency", "0.0"),
        ("memory_efficiency", "1e-300"),
        ("launch_overhead", '"1e20s"'),
    ],
)
def test_bad_gpu_files_name_the_key(tmp_path: Path, key: str, value: str) -> None:
    keys = {
        "memory": '"80GB"',
        "memory_bandwidth": '"3TB/s"',
        "peak_flops.float32": '"60TFLOP/s"',
        "matmul_efficiency": "0.7",
        "memory_efficiency": "0.8",
        "launch_overhead": '"5us"',
        "source": '"a table"',
    }
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{name} = {text}\n" for name, text in keys.items()))
    assert read_gpu(str(path)).name == "mine"
    path.write_text("".join(f"{name} = {text}\n" for name, text in (keys | {key: value}).items()))
    with pytest.raises(FileFormatError) as caught:
        read_gpu(str(path))
    assert f"{path}: '{key}'" in caught.value.message


def test_good_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cluster_text())
    cluster = read_cluster(str(path))
    assert cluster.name == "mine"
    assert cluster.gpu_at(7).name == "h100-sxm"


@pytest.mark.parametrize(
    ("name", "hint"), [("h100-sxn", "did you mean 'h100-sxm'?"), ("cray-1", "a100-sxm-40gb, a100-sxm-80gb, b200")]
)
def test_unknown_names_give_the_known_ones(name: str, hint: str) -> None:
    for read in (read_gpu, read_cluster):
        with pytest.raises(UsageError) as caught:
            read(name)
        assert repr(name) in caught.value.message
        assert hint in caught.value.hint


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(PlannerError) as caught:
        read_cluster(str(tmp_path / "none.toml"))
    assert "does not exist" in caught.value.message
    assert caught.value.exit_code == 2

"""The CPU platform reads limits of host and container, and restores the thread count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.errors import InternalError, UnsupportedError
from headrace.platforms import CpuPlatform, Memory, Platform

GIB = 1 << 30


def fake_root(root: Path, **files: str) -> CpuPlatform:
    """A platform over a tree with the given files; `__` in a name is a slash, `_dot_` a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CpuPlatform(root)


MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n"


def test_this_host():
    platform: Platform = CpuPlatform()
    assert platform.name == "cpu"
    assert platform.probe().available
    assert platform.devices() == ("cpu",)
    assert platform.cores() >= 1
    memory = platform.memory("cpu")
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert dict(platform.fingerprint().libraries)["torch"] == torch.__version__
    assert platform.fingerprint() == platform.fingerprint()
    for name in platform.capabilities().dtypes:
        assert torch.ones(2, dtype=getattr(torch, name), device="cpu").sum() == 2


def test_memory_without_a_container_limit(tmp_path):
    platform = fake_root(tmp_path, proc__meminfo=MEMINFO, sys__fs__cgroup__memory_dot_max="max\n")
    assert platform.memory() == Memory(16 * GIB, 8 * GIB)


def test_memory_limit_of_cgroup_v2(tmp_path):
    platform = fake_root(
        tmp_path,
        proc__meminfo=MEMINFO,
        sys__fs__cgroup__memory_dot_max=f"{4 * GIB}\n",
        sys__fs__cgroup__memory_dot_current=f"{GIB}\n",
    )
    assert platform.memory() == Memory(4 * GIB, 3 * GIB)


def test_memory_limit_of_cgroup_v1(tmp_path):
    platform = fake_root(
        tmp_path,
        proc__meminfo=MEMINFO,
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=f"{4 * GIB}\n",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes=f"{5 * GIB}\n",
    )
    assert platform.memory() == Memory(4 * GIB, 0)


def test_memory_without_proc_comes_from_the_system(tmp_path):
    memory = fake_root(tmp_path).memory()
    assert memory.total_bytes == memory.available_bytes > 0


def test_memory_of_another_device_is_refused():
    with pytest.raises(UnsupportedError, match="cuda:0"):
        CpuPlatform().memory("cuda:0")


@pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1)])
def test_cores_are_cut_to_the_quota(tmp_path, quota, cores):
    assert fake_root(tmp_path, sys__fs__cgroup__cpu_dot_max=quota).cores() == cores


def test_cores_without_a_quota_are_those_of_the_host(tmp_path):
    free = fake_root(tmp_path / "a", sys__fs__cgroup__cpu_dot_max="max 100000\n").cores()
    wide = fake_root(tmp_path / "b", sys__fs__cgroup__cpu_dot_max="99900000 100000\n").cores()
    assert free == wide == fake_root(tmp_path / "c").cores()


def test_fingerprint_names_the_processor(tmp_path):
    text = "processor : 0\nvendor_id : AcmeCPU\nmodel name : Acme 9000\n\nmodel name : other\n"
    fingerprint = fake_root(tmp_path, proc__cpuinfo=text).fingerprint()
    assert (fingerprint.vendor, fingerprint.device) == ("AcmeCPU", "Acme 9000")
    assert fake_root(tmp_path / "none").fingerprint().device


def test_threads_are_set_and_restored():
    platform, before = CpuPlatform(), torch.get_num_threads()
    with platform.threads(before + 1):
        assert torch.get_num_threads() == before + 1
        with platform.threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), platform.threads(before + 1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_threads_need_a_positive_count():
    before = torch.get_num_threads()
    with pytest.raises(InternalError, match="at least one"), CpuPlatform().threads(0):
        pass
    assert torch.get_num_threads() == before


def test_hardware_threads_of_a_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    root = tmp_path / "sys/devices/system/cpu"
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (5, "1,5"), (2, "2,6")):
        (root / f"cpu{cpu}/topology").mkdir(parents=True)
        (root / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings + "\n")
    platform = CpuPlatform(tmp_path)
    assert (platform.cores(), platform.physical_cores()) == (4, 3)
    assert CpuPlatform(tmp_path / "none").physical_cores() == 4

"""The memory that control groups leave a process, read from planted trees of /proc and /sys."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit-cpu")

import pytest

from sglang.srt.platforms import available_memory_bytes, control_group
from sglang.srt.platforms.control_group import memory_room

MIB = 1 << 20
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


class Machine:
    """A planted root: what the process is told of its groups, and the files of each. Sizes are MiB."""

    def __init__(self, root):
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64000 * 1024} kB\n")

    def told(self, groups, mounts):
        (self.root / "proc/self/cgroup").write_text(groups)
        (self.root / "proc/self/mountinfo").write_text(mounts)

    def write(self, folder, **files):
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            if isinstance(value, dict):
                text = "".join(f"{row} {size * MIB}\n" for row, size in value.items())
            else:
                text = f"{value if isinstance(value, str) else value * MIB}\n"
            (self.root / folder / f"memory.{name}").write_text(text)

    def v2(self, folder, limit, used=0, high="max", **stat):
        self.write(folder, max=limit, high=high, current=used, stat=stat)

    def v1(self, folder, limit, used=0, **stat):
        self.write(folder, limit_in_bytes=limit, usage_in_bytes=used, stat=stat)

    def room(self):
        room = memory_room(self.root)
        return None if room is None else room / MIB


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def crowded(machine):
    """A container of 4 GiB, of which files that were read fill 3.4: the kernel gives those back by itself."""
    machine.told("0::/\n", V2_MOUNT)
    machine.v2(V2, 4096, 3700, anon=216, inactive_file=2484, active_file=1000)
    return machine


def test_file_pages_of_a_container_are_not_taken_for_used(crowded):
    """A model file that was read once fills the cache, and the next start would find no room for its pool."""
    assert crowded.room() == 4096 - 216
    assert available_memory_bytes(crowded.root) == (4096 - 216) * MIB


def test_counting_file_pages_as_used_would_be_noticed(crowded, monkeypatch):
    """The twin: the arithmetic that the server had, planted again."""
    monkeypatch.setattr(control_group, "_reclaimable", lambda stat, version: 0)
    assert crowded.room() == 396


def test_only_what_is_given_back_at_once_counts_as_free(machine):
    """Pages on their way to a disk, shared memory and locked pages are held; caches of the kernel are not."""
    machine.told("0::/\n", V2_MOUNT)
    pages = {"inactive_file": 500, "active_file": 500, "file_dirty": 300, "file_writeback": 100}
    machine.v2(V2, 4096, 3000, file=2000, shmem=700, unevictable=300, slab_reclaimable=50, **pages)
    assert machine.room() == 4096 - (3000 - 600 - 50)
    machine.v2(V2, 4096, 3000, inactive_file=10, file_dirty=300, slab_reclaimable=50)
    assert machine.room() == 4096 - (3000 - 50)


@pytest.fixture
def nested(machine):
    """The own group has no limit, the one around it a wide one and the one around that a tight one."""
    machine.told("0::/pod/box/worker\n", V2_MOUNT)
    machine.v2(f"{V2}/pod/box/worker", "max", 10)
    machine.v2(f"{V2}/pod/box", 8000, 1000)
    machine.v2(f"{V2}/pod", 2000, 1500, inactive_file=200)
    return machine


def test_the_tightest_level_from_the_own_group_to_the_root_decides(nested):
    """The kernel ends a process for the limit of any group around it, not only for that of its own."""
    assert nested.room() == 2000 - 1300
    nested.v2(f"{V2}/pod/box/worker", 100, 10)
    assert nested.room() == 90


def test_asking_the_own_group_alone_would_be_noticed(nested, monkeypatch):
    """The twin of the test above."""
    walk = control_group._levels
    monkeypatch.setattr(control_group, "_levels", lambda *asked: list(walk(*asked))[:1])
    assert nested.room() is None


def test_above_memory_high_is_no_room(machine):
    """Above it the kernel lets nobody grow without giving back as much."""
    machine.told("0::/\n", V2_MOUNT)
    machine.v2(V2, 4096, 500, high=1000)
    assert machine.room() == 500


def test_a_group_that_is_over_its_limit_leaves_nothing(machine):
    machine.told("0::/\n", V2_MOUNT)
    machine.v2(V2, 1000, 1200)
    assert machine.room() == 0


def test_counters_that_were_read_at_different_moments_give_no_more_than_the_limit(machine):
    machine.told("0::/\n", V2_MOUNT)
    machine.v2(V2, 1000, 300, inactive_file=400)
    assert machine.room() == 1000


def test_version_1_is_read_with_its_groups_inside(machine):
    """Its plain rows leave out what groups inside hold, while its usage does not."""
    machine.told("4:memory:/docker/7\n3:cpu:/\n", V1_MOUNT)
    rows = {"inactive_file": 1, "total_inactive_file": 700, "total_active_file": 300, "total_dirty": 100}
    machine.v1(f"{V1}/docker/7", 4096, 3000, **rows)
    machine.v1(V1, str(2**63 - 4096), 9000)
    assert machine.room() == 4096 - (3000 - 900)


def test_version_1_tells_of_a_limit_above_what_is_mounted(machine):
    """A pod's limit stands on a group that its container cannot see."""
    machine.told("4:memory:/pod/box\n", V1_MOUNT.replace(" / ", " /pod/box ", 1))
    machine.v1(V1, str(2**63 - 4096), 400, hierarchical_memory_limit=1000)
    assert machine.room() == 600


def test_unlimited_groups_leave_the_machine_as_it_is(machine):
    machine.told("4:memory:/\n", V1_MOUNT)
    machine.v1(V1, str(2**63 - 4096), 400)
    assert available_memory_bytes(machine.root) == 64000 * MIB
    machine.told("0::/\n", V2_MOUNT)
    machine.v2(V2, "max", 400)
    assert machine.room() is None and available_memory_bytes(machine.root) == 64000 * MIB


def test_both_hierarchies_of_a_hybrid_machine_are_asked(machine):
    """Either may hold the memory controller; the other has no such files."""
    mounts = V1_MOUNT + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    machine.told("4:memory:/a\n1:name=systemd:/a\n0::/b\n", mounts)
    (machine.root / V2 / "unified/b").mkdir(parents=True)
    machine.v1(f"{V1}/a", 1000, 300)
    assert machine.room() == 700
    machine.v2(f"{V2}/unified/b", 500, 300)
    assert machine.room() == 200


@pytest.mark.parametrize(
    ("group", "shown"),
    [
        ("/docker/7", "/docker/7"),  # named as on the host, and only this group is mounted
        ("/docker/7", "/"),  # named as on the host, inside a namespace of its own
        ("/", "/.."),  # mounted before the namespace was made
        ("/../other", "/"),  # outside its own namespace
        ("/docker/7 (deleted)", "/"),
        ("/docker/7", "/docker/77"),
    ],
)
def test_a_group_that_the_mount_does_not_show_is_asked_at_the_root_of_the_mount(machine, group, shown):
    """In a container the name of the group and the tree that is mounted may come from different sides."""
    machine.told(f"0::{group}\n", V2_MOUNT.replace(" / ", f" {shown} ", 1))
    machine.v2(V2, 1000, 300)
    assert machine.room() == 700


def test_a_mount_of_another_part_of_the_tree_is_not_asked(machine):
    """A second mount that shows somebody else's group says nothing of this process."""
    other = "40 23 0:28 /other /mnt/my\\040groups rw - cgroup2 cgroup2 rw\n"
    machine.told("0::/mine\n", V2_MOUNT + other)
    machine.v2(f"{V2}/mine", 1000, 300)
    machine.v2("mnt/my groups", 10, 0)
    assert machine.room() == 700
    machine.told("0::/other/mine\n", V2_MOUNT + other)
    assert machine.room() == 10


def test_without_the_lists_of_groups_and_mounts_the_usual_places_are_asked(machine):
    machine.v2(V2, 1000, 300)
    assert machine.room() == 700
    (machine.root / "proc/self/mountinfo").write_text("torn line\n\n- \n1 2 3 4 - cgroup2\n")
    assert machine.room() == 700
    machine.v1(V1, 500, 300)
    assert machine.room() == 200


def test_a_file_that_is_missing_or_not_to_be_read_limits_nothing(machine):
    """What is not known counts as held where a limit is known, and as no limit where none is."""
    machine.told("0::/a\n", V2_MOUNT)
    machine.v2(f"{V2}/a", 1000, 300)
    machine.v2(V2, "many", 1)
    assert machine.room() == 700
    (machine.root / V2 / "a/memory.stat").write_text("inactive_file\nactive_file x\n\n")
    assert machine.room() == 700
    for name in ("stat", "high", "current"):
        (machine.root / V2 / f"a/memory.{name}").unlink()
    assert machine.room() == 1000
    (machine.root / V2 / "a/memory.max").unlink()
    (machine.root / V2 / "a/memory.max").mkdir()
    assert machine.room() is None


def test_this_machine_answers():
    assert available_memory_bytes() > 0

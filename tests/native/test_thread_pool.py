"""Goal: the pool's Python face keeps its promises; the pool itself is tested natively.

Method: more threads than CPUs where interleavings matter, resource usage where idleness does.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from idleness import count_sleeps, is_awake, list_threads, observe
from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.core.errors import CapacityError, ConfigError, ConflictError, ShapeError


def test_size_follows_the_machine():
    pool = ThreadPool()
    assert pool.num_threads == recommend_threads(read_topology()).threads
    assert sum(pool.threads_per_node) == pool.num_threads


def test_more_threads_than_cpus_are_clamped_with_a_warning():
    num_cpus = len(os.sched_getaffinity(0))
    with pytest.warns(RuntimeWarning, match=f"{num_cpus + 7} threads asked"):
        pool = ThreadPool(num_cpus + 7)
    assert pool.num_threads == num_cpus


def test_oversubscribed_pool_never_polls():
    num_cpus = len(os.sched_getaffinity(0))
    pool = ThreadPool(num_cpus + 2, oversubscribe=True)
    assert (pool.num_threads, pool.spin_us) == (num_cpus + 2, 0)
    assert pool.run_noop(1000) == 1000


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_absurd_sizes_are_refused(threads: int):
    with pytest.raises(ConfigError) as caught:
        ThreadPool(threads, oversubscribe=True)
    assert caught.value.field == "threads"


def test_absurd_task_counts_are_refused():
    with pytest.raises(ConfigError, match="2\\^48"):
        ThreadPool(2, oversubscribe=True).run_noop(2**60)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(("num_tasks", "chunk"), [(0, 1), (1, 1), (1000, 1), (1000, 7), (5, 900)])
def test_every_task_runs(num_threads: int, num_tasks: int, chunk: int):
    pool = ThreadPool(num_threads, oversubscribe=True)
    for _ in range(20):
        assert pool.run_noop(num_tasks, chunk) == num_tasks


def test_fixed_schedule_is_equal_ranges_in_thread_order():
    pool = ThreadPool(4, oversubscribe=True)
    expected = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert all(pool.trace_fixed(10) == expected for _ in range(100))


def test_several_python_threads_may_submit():
    pool = ThreadPool(3, oversubscribe=True)
    counts: list[int] = []
    submitters = [
        threading.Thread(target=lambda: counts.extend(pool.run_noop(50) for _ in range(100)))
        for _ in range(4)
    ]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join(timeout=60)
    assert counts == [50] * 400


@pytest.mark.parametrize("size", [0, 1, 8191, 8193, 1_000_003])
def test_parallel_sum_is_bitwise_equal_for_any_thread_count(size: int):
    values = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
    sums = {ThreadPool(n, oversubscribe=True).parallel_sum(values) for n in (1, 2, 5)}
    assert len(sums) == 1
    # Each of `size` additions in float64 errs by at most eps/2 of the sum of magnitudes.
    bound = size * np.finfo(np.float64).eps * float(np.abs(values).sum(dtype=np.float64))
    assert abs(sums.pop() - float(values.sum(dtype=np.float64))) <= bound


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(4),
        np.zeros((2, 2), np.float32),
        np.zeros(8, np.float32)[::2],
        np.zeros(4, np.int32),
    ],
    ids=["float64", "matrix", "strided", "int32"],
)
def test_parallel_sum_refuses_other_arrays(values: np.ndarray):
    with pytest.raises(ShapeError, match="float32 vector"):
        ThreadPool(1).parallel_sum(values)


def test_idle_pool_uses_no_cpu_time():
    """The threads poll for microseconds, then sleep, and wake up for nothing but a job."""
    before = list_threads()
    pool = ThreadPool(len(os.sched_getaffinity(0)))
    pool.trace_fixed(pool.num_threads)  # Every worker has started.
    seen = observe(list_threads() - before, max_looks=100)
    assert len(seen) == pool.num_threads - 1
    for each in seen.values():
        assert each.num_awake * 10 <= each.num_looks, seen
        assert each.num_sleeps * 20 <= each.num_looks, seen
    assert pool.run_noop(100) == 100


def read_workers(file: str) -> dict[str, str]:
    """Return what this file says of each of this process's workers, by their numbers."""
    texts = {}
    for task in Path("/proc/self/task").iterdir():
        # Those of earlier pools may be ending.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().startswith("tandem-"):
                texts[task.name] = (task / file).read_text()
    return texts


def count_worker_ns() -> int:
    """Time that this process's workers have been on a CPU."""
    return sum(int(text.split()[0]) for text in read_workers("schedstat").values())


def test_polls_for_a_job_that_comes_soon():
    """A worker that sleeps before each job costs a wake-up, which is longer than a small job."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs: on one, workers never poll")
    before = list_threads()
    pool = ThreadPool(2)
    pool.trace_fixed(2)
    (worker,) = list_threads() - before
    fewest = rounds = 50
    # One of many tries: where others run, the next job is late, or no CPU is left to poll on. One
    # that never polls sleeps in most rounds of each try.
    for _ in range(2000):
        sleeps = count_sleeps(worker)
        for _ in range(rounds):
            pool.trace_fixed(2)  # Each has a part that no other takes.
        fewest = min(fewest, count_sleeps(worker) - sleeps)
        if fewest <= rounds // 10:
            break
    assert fewest <= rounds // 10


def test_sleeps_soon_after_a_job():
    """Between jobs that come each 2 ms a worker polls for its 30 us and sleeps the rest."""
    before = list_threads()
    pool = ThreadPool(len(os.sched_getaffinity(0)))
    pool.trace_fixed(pool.num_threads)
    workers = list_threads() - before
    num_asleep, rounds = 0, 100
    for _ in range(rounds):
        pool.run_noop(100)
        threading.Event().wait(0.002)
        num_asleep += sum(not is_awake(worker) for worker in workers)
    # One that has just polled may wait for a CPU; one that still polls is never asleep.
    assert num_asleep * 3 >= rounds * len(workers)


def test_leaves_the_cpus_to_torch():
    """While torch computes on all threads, ours use none of them."""
    torch = pytest.importorskip("torch", reason="needs the `serve` extra")
    pool = ThreadPool(len(os.sched_getaffinity(0)))
    matrix = torch.ones(512, 512)
    polled_ns = used_ns = 0
    for _ in range(10):
        pool.run_noop(100)
        before, start = count_worker_ns(), time.monotonic_ns()
        while time.monotonic_ns() - start < 20_000_000:
            matrix @ matrix
        polled_ns += count_worker_ns() - before
        used_ns += time.monotonic_ns() - start
    assert polled_ns < used_ns / 20


ONE_CPU = """
import os, time, warnings
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tandem._native import ThreadPool, read_topology, recommend_threads
assert recommend_threads(read_topology()).threads == ThreadPool().num_threads == 1
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert ThreadPool(2).num_threads == 1
assert "2 threads asked" in str(caught[0].message), caught
pool = ThreadPool(2, oversubscribe=True)
assert pool.spin_us == 0
before = time.process_time_ns()
for _ in range(300):
    assert pool.run_noop(8) == 8
print((time.process_time_ns() - before) / 300e3)
"""


def test_one_cpu_is_never_spun_away_from_the_submitter():
    """Two threads on one CPU: a worker or submitter that polled would cost the other its slice."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_CPU], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # A polled slice is milliseconds.
    assert float(done.stdout) < 500


def test_dropping_pools_ends_their_threads():
    before = set(read_workers("comm"))
    pool = ThreadPool(4, oversubscribe=True)
    pool.trace_fixed(4)  # Every worker has started, and so has its name.
    workers = set(read_workers("comm")) - before
    assert len(workers) == 3
    del pool
    # They were waited for, but the kernel lists a thread for a moment after it has said its end.
    limit_s = time.monotonic() + 60
    while workers & set(read_workers("comm")):
        assert time.monotonic() < limit_s
        time.sleep(0.001)


def test_forked_child_gets_a_clear_error_and_may_make_its_own():
    """In Python alone: a sanitizer's allocator may keep a lock over a fork, and the child hangs."""
    pool = ThreadPool(3, oversubscribe=True)
    pool.run_noop(10)
    with warnings.catch_warnings():
        # From 3.12 on Python warns of any fork of a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            pool.run_noop(10)
        except ConflictError as error:
            own = ThreadPool(3, oversubscribe=True)
            status = 0 if "fork" in str(error) and own.run_noop(10) == 10 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pool.run_noop(10) == 10


def test_a_refused_thread_is_a_capacity_error():
    """Runs in a child, as another user, because the limit of processes does not bind root."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user without processes")
    import resource

    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            os.setuid(54321)
            ThreadPool(8, oversubscribe=True)
        except CapacityError as error:
            status = 0 if "refused" in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_wakeup_benchmark_measures_both():
    times = ThreadPool(2, oversubscribe=True).benchmark_wakeup(rounds=20, gap_us=5)
    assert times.pool_ns > 0
    assert times.condvar_ns > 0
    assert times.ratio > 0
    with pytest.raises(ConfigError):
        ThreadPool(1).benchmark_wakeup(rounds=20)

"""Merged calibrations of ranks equal that of one process, for any number of ranks and limit of memory."""

import queue
import threading

import pytest
import torch
from calibrated_nets import Net

from clika_ref import DistributedTrainingSettings, ModelError, clika_compile, clika_distribute
from clika_ref.distributed.merging import gather_batches, interleave_turns, merge_calibrations
from clika_ref.distributed.ranks import SINGLE_PROCESS, Ranks, RemoteFailureError, broadcast_from_rank0, open_ranks
from clika_ref.quantization.calibration.calibrator import Calibration, Reservoir
from clika_ref.quantization.calibration.fingerprint import batch_fingerprint
from clika_ref.quantization.calibration.range_table import RangeTable


class Thread(Ranks):
    """A rank in a thread of this process, which exchanges messages in lists."""

    def _exchange_bytes(self, message, failure=None):
        rooms, barrier = self.group
        rooms[self.rank] = (message, failure)
        barrier.wait(20)
        said = list(rooms)
        barrier.wait(20)
        failed = {rank: text for rank, (_, text) in enumerate(said) if text is not None}
        if failed and failure is None:
            raise RemoteFailureError(str(failed))
        return [message for message, _ in said]

    def sum_counts(self, counts):
        rooms, barrier = self.group
        rooms[self.rank] = counts.clone()
        barrier.wait(20)
        total = sum(rooms)
        barrier.wait(20)
        return total


def run_on_ranks(count, work):
    """Return the results of several ranks that run a function at once."""
    group, results = ([None] * count, threading.Barrier(count)), queue.Queue()

    def run(rank):
        try:
            results.put((rank, work(Thread(rank, count, group))))
        except RemoteFailureError as error:
            results.put((rank, error))  # all have met: none waits, and one may be about to leave
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            group[1].abort()
            results.put((rank, error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = dict(results.get() for _ in threads)
    return [found[rank] for rank in range(count)]


@pytest.fixture(scope="module")
def graph():
    return clika_compile(Net().eval(), tracing_inputs=[torch.zeros(2, 32), torch.zeros(3, 32)]).graph


def make_data(count, seed=0):
    spread = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (count,), generator=spread).tolist()
    reach = (10 ** torch.randn(count, generator=spread)).tolist()
    return [torch.randn(size, 32, generator=spread) * by for size, by in zip(sizes, reach, strict=True)]


def calibrate(graph, batches, limit):
    found = Calibration(graph, RangeTable(smoothing={}), Reservoir(limit))
    for x in batches:
        found.add([x])
    return found


def describe_calibration(found):
    """Return all facts that the plan can depend on, and the others that are kept."""
    values = {
        name: (s.low, s.high, s.batches, s.is_unbounded, *s.mean_min_max, s.histogram.exponent, s.histogram.total)
        for name, s in found.table.values.items()
    }
    counts = {name: s.histogram.counts.tolist() for name, s in found.table.values.items()}
    kept = [batch_fingerprint(inputs) for inputs in found.reservoir.batches]
    reservoir = (kept, found.reservoir.used_bytes, found.reservoir.is_full)
    return values, counts, reservoir, found.sizes, found.table.batches, found.table.first


@pytest.mark.parametrize("limit", [1, 700, 1500, 4000, 2**26])
@pytest.mark.parametrize(("ranks", "count"), [(2, 7), (3, 7), (4, 4), (5, 3)])
def test_merge_calibrations_matches_one_process(graph, ranks, count, limit):
    """Merged calibrations equal that of one process, for any reservoir limit."""
    batches = make_data(count, seed=ranks * 100 + limit)
    wanted = describe_calibration(calibrate(graph, batches, limit))

    def work(rank):
        found = calibrate(graph, batches[rank.rank :: ranks], limit)
        return merge_calibrations(found, rank), describe_calibration(found)

    for counts, found in run_on_ranks(ranks, work):
        assert counts == [len(batches[rank::ranks]) for rank in range(ranks)]
        assert found == wanted


def test_merge_calibrations_uneven_ranks_alternate(graph):
    """Batches of ranks with uneven counts are merged in turns."""
    batches, counts = make_data(6), [1, 4, 1]
    turns = interleave_turns(counts)
    assert turns == [(0, 0), (0, 1), (0, 2), (1, 1), (2, 1), (3, 1)]
    own = [[x for x, (_, rank) in zip(batches, turns, strict=True) if rank == r] for r in range(3)]
    wanted = describe_calibration(calibrate(graph, batches, 3000))

    def work(rank):
        found = calibrate(graph, own[rank.rank], 3000)
        merge_calibrations(found, rank)
        return describe_calibration(found)

    assert run_on_ranks(3, work) == [wanted] * 3


def test_merge_calibrations_full_reservoir_keeps_no_more(graph):
    """No batch is kept after the first one that exceeds the reservoir of a rank."""
    one, many = [torch.ones(1, 32)], [torch.ones(1, 32), torch.ones(8, 32), torch.ones(1, 32)]
    wanted = describe_calibration(calibrate(graph, one + many, 1000))

    def work(rank):
        found = calibrate(graph, many if rank.rank else one, 1000)
        merge_calibrations(found, rank)
        return describe_calibration(found)

    assert run_on_ranks(2, work) == [wanted] * 2
    assert len(wanted[2][0]) == 2


def test_merge_calibrations_unbounded_on_one_rank_counts(graph):
    """An activation that is unbounded on one rank has no scale on any rank."""
    spoiled = torch.full((2, 32), 1e31)

    def work(rank):
        found = calibrate(graph, [spoiled] if rank.rank else make_data(2), 4000)
        merge_calibrations(found, rank)
        return [name for name, s in found.table.values.items() if s.is_unbounded]

    one, other = run_on_ranks(2, work)
    assert one == other != []


def test_gather_batches_failing_rank_raises_on_others():
    """A failing rank raises an error with its reason on the others."""

    def work(rank):
        if rank.rank:
            rank.report_failure(ValueError("no"))
            return "told"
        return gather_batches(rank, [[torch.ones(1)]], is_per_rank=True)

    heard, told = run_on_ranks(2, work)
    assert isinstance(heard, RemoteFailureError)
    assert "ValueError: no" in str(heard)
    assert told == "told"


def test_gather_batches_dealt_or_from_rank0():
    """Dealt batches are gathered in turns; others are those of rank 0."""

    def work(rank, is_per_rank):
        own = [[torch.tensor([10 * rank.rank + i]), torch.tensor([i % 2 == 0])] for i in range(3 - rank.rank)]
        found = gather_batches(rank, own, is_per_rank=is_per_rank)
        return [[x.tolist() for x in inputs] for inputs in found]

    dealt = [[[0], [True]], [[10], [True]], [[1], [False]], [[11], [False]], [[2], [True]]]
    assert run_on_ranks(2, lambda rank: work(rank, True)) == [dealt, dealt]
    assert run_on_ranks(2, lambda rank: work(rank, False)) == [dealt[::2]] * 2
    assert work(SINGLE_PROCESS, True) == work(SINGLE_PROCESS, False) == dealt[::2]


def test_broadcast_from_rank0_other_shapes_unchanged():
    """Tensors get the data of rank 0, except those with another shape."""

    def work(rank):
        own = torch.full((2,), float(rank.rank)), torch.full((2 + rank.rank,), float(rank.rank))
        broadcast_from_rank0(rank, {"same": own[0], "other": own[1]})
        return [x.tolist() for x in own]

    assert run_on_ranks(2, work) == [[[0, 0], [0, 0]], [[0, 0], [1, 1, 1]]]


def test_single_process_gathers_own_messages():
    """A single process gathers its own messages only."""
    with open_ranks(None) as ranks, open_ranks(DistributedTrainingSettings()) as others:
        assert ranks is others is SINGLE_PROCESS
    assert SINGLE_PROCESS.gather_messages(({"a": 1}, {})) == [({"a": 1}, {})]


def test_open_ranks_with_other_settings_is_rejected():
    with pytest.raises(ModelError, match=r"distributed_training_settings is 2, a int\. Pass "), open_ranks(2):
        pass


def test_multi_gpu_without_process_group_raises():
    """`multi_gpu=True` without a process group raises an error."""
    module = clika_compile(Net().eval(), tracing_inputs=[torch.zeros(2, 32)])
    message = r"multi_gpu=True needs a process group, and there is none. .*torchrun"
    for work in (
        lambda: clika_compile(
            Net().eval(),
            tracing_inputs=[torch.zeros(2, 32)],
            distributed_training_settings=DistributedTrainingSettings(multi_gpu=True),
        ),
        lambda: clika_distribute(module, DistributedTrainingSettings(multi_gpu=True)),
    ):
        with pytest.raises(ModelError, match=message):
            work()


def test_clika_distribute_single_process_returns_module():
    """In a single process, `clika_distribute` returns the module itself and rejects others."""
    module = clika_compile(Net().eval(), tracing_inputs=[torch.zeros(2, 32)])
    assert clika_distribute(module, DistributedTrainingSettings()) is module
    assert module.clika_gather() is module
    with pytest.raises(ModelError, match=r"cannot distribute a Net: it is no ClikaModule. Compile it first"):
        clika_distribute(Net(), DistributedTrainingSettings())

"""The communicator keeps its promises on every backend and for every number of ranks."""

import time

import pytest
import torch
from mpi4py import MPI

from nvdd_md.comm import CommError, CommTimeoutError, Communicator, Traffic, as_communicator
from nvdd_md.comm.byte_communicator import SMALL_SUM_BYTES

DTYPES = [
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
]
TRAILING_SHAPES = [(), (3,), (2, 1, 5), (0,), (4, 0)]


def count_matrix(size: int, seed: int, high: int) -> list[list[int]]:
    """Rows from each rank to each: the same on all ranks, with zeros and one idle rank."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, high, (size, size), generator=generator)
    counts[torch.rand((size, size), generator=generator) < 0.3] = 0
    idle = seed % size
    counts[idle, :] = 0
    counts[:, idle] = 0
    return counts.tolist()


def rows_between(source: int, target: int, n: int, shape: tuple[int, ...], dtype: torch.dtype):
    """Return the rows one rank sends another, known to both."""
    generator = torch.Generator().manual_seed(1000 * source + target)
    return torch.randn((n, *shape), generator=generator, dtype=torch.float64).mul(9).to(dtype)


def check_exchange(comm: Communicator, counts: list[list[int]], shape=(), dtype=torch.float64):
    rank, ranks = comm.rank, range(comm.size)
    send_counts, recv_counts = counts[rank], [counts[source][rank] for source in ranks]
    rows = torch.cat([rows_between(rank, t, counts[rank][t], shape, dtype) for t in ranks])
    expected = torch.cat([rows_between(s, rank, counts[s][rank], shape, dtype) for s in ranks])
    received = comm.exchange_rows(rows, send_counts, recv_counts)
    assert received.dtype == dtype
    assert received.shape == (sum(recv_counts), *shape)
    assert torch.equal(received, expected)


def partial(rank: int, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return one rank's term of a sum, known to all. Terms of very different size."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(n, generator=generator, dtype=torch.float64) * 10.0 ** (3 * rank)).to(dtype)


# ------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("seed", range(5))
def test_exchange_of_random_counts(backend_comm, seed):
    check_exchange(backend_comm, count_matrix(backend_comm.size, seed, 7), (3,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_by_bit(backend_comm, dtype):
    check_exchange(backend_comm, count_matrix(backend_comm.size, 11, 5), (3,), dtype)


@pytest.mark.parametrize("shape", TRAILING_SHAPES, ids=str)
def test_any_trailing_shape(backend_comm, shape):
    check_exchange(backend_comm, count_matrix(backend_comm.size, 3, 5), shape)


def test_nan_bits_arrive(backend_comm):
    """A payload in a NaN is data like any other."""
    comm = backend_comm
    bits = torch.full((comm.size,), 0x7FF8_0000_0000_1234 + comm.rank, dtype=torch.int64)
    ones = [1] * comm.size
    received = comm.exchange_rows(bits.view(torch.float64), ones, ones).view(torch.int64)
    assert received.tolist() == [0x7FF8_0000_0000_1234 + rank for rank in range(comm.size)]


def test_large_messages_do_not_deadlock(backend_comm):
    """Small messages are buffered; these wait for their receiver."""
    size = backend_comm.size
    counts = [[60_000 + 1000 * s + t for t in range(size)] for s in range(size)]
    check_exchange(backend_comm, counts, (8,))


def test_strided_rows_and_rows_with_gradients(backend_comm):
    comm = backend_comm
    table = torch.arange(6.0 * comm.size).reshape(3, 2 * comm.size).requires_grad_()
    twos = [2] * comm.size
    received = comm.exchange_rows(table.T, twos, twos)
    assert not received.requires_grad
    assert torch.equal(received, table.detach().T[2 * comm.rank :][:2].repeat(comm.size, 1))


def test_only_partners_take_part(backend_comm):
    """A rank without rows to send or receive may stay away."""
    comm = backend_comm
    if comm.size < 3:
        pytest.skip("needs a third rank that stays away")
    counts = [[0] * comm.size for _ in range(comm.size)]
    counts[0][1], counts[1][0] = 2, 3
    if comm.rank < 2:
        check_exchange(comm, counts, (3,))
        assert comm.traffic.messages == 1
    comm.barrier()


def test_exchange_counts(backend_comm):
    comm = backend_comm
    received = comm.exchange_counts([10 * comm.rank + target for target in range(comm.size)])
    assert received == [10 * source + comm.rank for source in range(comm.size)]


@pytest.mark.parametrize("n_rows", [0, 1, 5])
def test_gather_of_equal_records(backend_comm, n_rows):
    comm = backend_comm
    gathered = comm.gather_rows(torch.full((n_rows, 2), comm.rank))
    assert gathered.shape == (n_rows * comm.size, 2)
    assert gathered[:, 0].tolist() == [rank for rank in range(comm.size) for _ in range(n_rows)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64], ids=str)
def test_gather_of_uneven_rows(backend_comm, dtype):
    comm = backend_comm
    counts = [(3 * rank) % 4 for rank in range(comm.size)]  # rank 0 has none
    parts = [rows_between(rank, 0, n, (3,), dtype) for rank, n in enumerate(counts)]
    gathered = comm.gather_rows(parts[comm.rank], counts)
    assert torch.equal(gathered, torch.cat(parts))


def test_gather_of_nothing(backend_comm):
    comm = backend_comm
    assert comm.gather_rows(torch.empty(0, 3), [0] * comm.size).shape == (0, 3)
    assert comm.gather_rows(torch.empty(2, 0), [2] * comm.size).shape == (2 * comm.size, 0)


# -------------------------------------------------------------------------------------- sum

SMALL = SMALL_SUM_BYTES // 8
SUM_LENGTHS = [1, 7, SMALL, SMALL + 1, 5 * SMALL + 3]


@pytest.mark.parametrize("n", SUM_LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sum_is_the_ordered_float64_sum_with_the_same_bits(backend_comm, n, dtype):
    comm = backend_comm
    n = n * 8 // dtype.itemsize
    total = comm.sum(partial(comm.rank, n, dtype))
    expected = partial(0, n, dtype).to(torch.float64)
    for rank in range(1, comm.size):
        expected = expected + partial(rank, n, dtype).to(torch.float64)
    assert total.dtype == dtype
    assert torch.equal(total, expected.to(dtype))
    assert len(set(comm.gather_objects(total.view(torch.uint8).numpy().tobytes()))) == 1


def test_integers_add_exactly_and_bools_mean_any(backend_comm):
    comm = backend_comm
    large = 2**53 + 1
    assert comm.sum(torch.tensor(large + comm.rank)).item() == sum(
        large + rank for rank in range(comm.size)
    )
    flags = torch.arange(comm.size + 1) == comm.rank
    assert comm.sum(flags).tolist() == [True] * comm.size + [False]


@pytest.mark.parametrize("shape", [(), (2, 3), (0,), (3, 0), (300, 100)], ids=str)
def test_sum_keeps_the_shape_and_the_input(backend_comm, shape):
    x = torch.ones(shape, requires_grad=True)
    total = backend_comm.sum(x)
    assert torch.equal(total, torch.full(shape, float(backend_comm.size)))
    assert not total.requires_grad
    assert torch.equal(x, torch.ones(shape))
    assert total.data_ptr() != x.data_ptr() or x.numel() == 0


# ---------------------------------------------------------------------------------- objects


def test_objects(backend_comm):
    comm = backend_comm
    gathered = comm.gather_objects({"rank": comm.rank, "text": "x" * 1000 * comm.rank})
    assert [len(entry["text"]) for entry in gathered] == [1000 * r for r in range(comm.size)]
    for root in range(comm.size):
        sent = ("from", root, torch.arange(root)) if comm.rank == root else None
        word, source, tensor = comm.broadcast_object(sent, root)
        assert (word, source, tensor.tolist()) == ("from", root, list(range(root)))
    assert comm.broadcast_object(None) is None


# --------------------------------------------------------------------------------- barriers


def test_barrier_waits_for_all(backend_comm):
    comm = backend_comm
    late = comm.size - 1
    for timeout_s in (None, 30.0):
        comm.barrier()
        started = time.perf_counter()
        if comm.rank == late:
            time.sleep(0.2)
        comm.barrier(timeout_s)
        assert time.perf_counter() - started > 0.19 or comm.size == 1


def test_timeout_names_the_missing_rank_and_leaves_a_usable_communicator(backend_comm):
    comm = backend_comm
    if comm.size == 1:
        pytest.skip("nobody can be late")
    late = comm.size - 1
    if comm.rank == late:
        time.sleep(1.0)
        comm.barrier(30.0)  # finds the notices of those who have given up
    else:
        with pytest.raises(CommTimeoutError, match=rf"rank\(s\) {late} of this group"):
            comm.barrier(0.2)
    for _ in range(3):
        comm.barrier(30.0)
    assert comm.sum(torch.tensor(1.0)).item() == comm.size
    check_exchange(comm, count_matrix(comm.size, 1, 7), (3,))


def test_a_watchdog_sees_the_wait_and_may_end_it(backend_comm):
    comm = backend_comm
    if comm.size == 1:
        pytest.skip("nobody can be late")

    if comm.rank == 0:
        time.sleep(0.6)
        comm.barrier(30.0)
    else:
        comm.on_wait = give_up
        with pytest.raises(CommError, match="ended the barrier"):
            comm.barrier(30.0)
        comm.on_wait = None
    comm.barrier(30.0)


def test_rows_that_arrive_after_the_wait_was_given_up_hit_no_freed_memory(comm):
    if comm.size == 1:
        pytest.skip("nobody can be late")
    counts = [[100_000] * comm.size for _ in range(comm.size)]
    if comm.rank == 0:
        time.sleep(0.6)
    else:
        comm.on_wait = give_up
    try:
        check_exchange(comm, counts)
        ended = False
    except CommError:
        ended = True
    comm.on_wait = None
    assert ended == (comm.rank != 0)
    if ended:
        with pytest.raises(CommError, match="row exchange was given up"):
            comm.sum(torch.zeros(1))
        comm.state.given_up = None  # this test knows that no rank waits for anything more
    comm.barrier(30.0)
    check_exchange(comm, counts)


def give_up(what: str, waited_s: float) -> None:
    """End a wait after a moment, as a watchdog would."""
    if waited_s > 0.1:
        raise CommError(f"ended the {what}")


# ---------------------------------------------------------------------------------- traffic


def test_traffic_is_counted_exactly(backend_comm):
    comm = backend_comm
    counts = count_matrix(comm.size, 5, 6)
    check_exchange(comm, counts, (3,), torch.float32)
    sent = [n for target, n in enumerate(counts[comm.rank]) if n and target != comm.rank]
    assert comm.traffic == Traffic(len(sent), 12 * sum(sent), 0, 0)

    others = comm.size > 1
    for call, collectives, n_bytes in [
        (lambda: comm.exchange_counts([1] * comm.size), 1, 8 * comm.size),
        (lambda: comm.gather_rows(torch.zeros(4, 2)), 1, 32),
        (
            lambda: comm.gather_rows(torch.zeros(comm.rank), list(range(comm.size))),
            1,
            4 * comm.rank,
        ),
        (lambda: comm.sum(torch.zeros(5)), 1, 20),
        (lambda: comm.sum(torch.zeros(12 * SMALL)), 2, 48 * SMALL + 48 * SMALL // comm.size),
        (lambda: comm.sum(torch.zeros(0)), 0, 0),
        (comm.barrier, 1, 0),
    ]:
        before = comm.traffic.snapshot()
        call()
        assert comm.traffic - before == Traffic(0, 0, collectives * others, n_bytes * others)

    comm.traffic.reset()
    assert comm.traffic == Traffic()


# ----------------------------------------------------------------------------------- groups


def test_split_orders_by_key_and_leaves_out_ranks_without_colour(backend_comm):
    comm = backend_comm
    color = None if comm.rank == 1 else comm.rank % 2
    part = comm.split(color, key=-comm.rank)
    if color is None:
        assert part is None
    else:
        members = [r for r in range(comm.size) if r != 1 and r % 2 == color][::-1]
        assert (part.rank, part.size) == (members.index(comm.rank), len(members))
        assert (part.local_rank, part.local_size) == (part.rank, part.size)
        assert part.gather_objects(comm.rank) == members
        assert part.gather_rows(torch.tensor([comm.rank])).tolist() == members
        assert part.exchange_counts(members) == [comm.rank] * len(members)
        assert part.broadcast_object(comm.rank, part.size - 1) == members[-1]
        check_exchange(part, count_matrix(part.size, 2, 5), (3,))
        total = part.sum(partial(part.rank, 3 * SMALL))
        assert torch.equal(total, sum(partial(r, 3 * SMALL) for r in range(part.size)))
        part.barrier(30.0)
        part.close()
    comm.barrier()


def test_two_groups_on_the_same_ranks_and_a_second_split(backend_comm):
    comm = backend_comm
    with comm.split(0) as first, comm.split(0) as second:
        assert second.sum(torch.tensor(1)).item() == comm.size
        assert first.sum(torch.tensor(2)).item() == 2 * comm.size
        with first.split(first.rank) as alone:
            assert alone.size == 1
            check_exchange(alone, [[4]], (3,))


def test_many_communicators_cost_one_mpi_context(world):
    """MPICH has about 2000 contexts; a program may make any number of calculators."""
    for _ in range(3000):
        comm = as_communicator(world)
    assert comm.sum(torch.tensor(1)).item() == world.size
    for _ in range(3000):
        group = MPI.COMM_SELF.Dup()
        as_communicator(group)
        group.Free()  # and our duplicate with it


def test_ranks_outside_get_an_error(world):
    half = world.Split(0 if world.rank == 0 else MPI.UNDEFINED)
    if world.rank == 0:
        assert as_communicator(half).size == 1
        half.Free()
    else:
        with pytest.raises(CommError, match="COMM_NULL"):
            as_communicator(half)


def test_an_intercommunicator_is_refused(world):
    side = world.Split(world.rank % 2)
    between = side.Create_intercomm(0, world, 1 - world.rank % 2)
    with pytest.raises(CommError, match="Merge"):
        as_communicator(between)
    between.Free()
    side.Free()


# ----------------------------------------------------------------------------------- misuse


def test_wrong_counts_are_refused_before_anything_is_sent(backend_comm):
    comm = backend_comm
    rows, none = torch.zeros(2, 3), [0] * comm.size
    own_two = [2 if rank == comm.rank else 0 for rank in range(comm.size)]
    too_many = [*own_two, 0]
    negative = [n - 1 for n in none]
    for send, recv, message in [
        (too_many, own_two, "one count per rank"),
        (own_two, too_many, "one count per rank"),
        (negative, none, "negative"),
        (none, none, "add up to 0"),
        (own_two, none, "sends itself 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            comm.exchange_rows(rows, send, recv)
    with pytest.raises(ValueError, match="counts expected"):
        comm.exchange_counts(too_many)
    with pytest.raises(ValueError, match="has 2 rows"):
        comm.gather_rows(rows, none)
    with pytest.raises(ValueError, match="not a rank"):
        comm.broadcast_object(1, root=comm.size)
    assert comm.traffic == Traffic()

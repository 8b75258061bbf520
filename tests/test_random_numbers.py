"""Random numbers that depend on seed, use, step and atom alone, and follow their distributions.

Tests of distributions have fixed seeds. Their pass rule: a mean, a variance or a correlation is
within 4 standard errors of its value, and a Kolmogorov-Smirnov test gives p > 0.001.
"""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from nvdd_md.integrators.portable_math import normal_quantiles
from nvdd_md.integrators.random_numbers import (
    BLOCK,
    ScalarNoise,
    Stream,
    checked_seed,
    normals,
    philox,
)

THERMOSTAT, VELOCITIES = Stream.THERMOSTAT, Stream.VELOCITIES
MAX_WORD = 2**32 - 1
N = 200_000

# The generator's authors publish these with it (file kat_vectors of Random123).
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]

PINNED = [
    "-0x1.6b4d3eaeab0dbp-2",
    "0x1.607528065dc56p-1",
    "-0x1.1588139a6b519p-1",
    "-0x1.87b43ebac7a31p-2",
    "-0x1.4d9b9e59c11a3p+1",
    "-0x1.7e720fc95612bp-2",
]
PINNED_SCALARS = [
    "-0x1.c81aa5417dbcfp-4",
    "0x1.fed936a5a2016p+0",
    "0x1.5ce3030e95afdp-3",
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def atoms(n: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + n)


def within_4_standard_errors(sample: np.ndarray, mean: float) -> bool:
    return abs(sample.mean() - mean) < 4.0 * sample.std() / math.sqrt(sample.size)


# ---------------------------------------------------------------------------- the generator


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert philox(torch.tensor(words(counter)), words(key)).tolist() == words(answer)


def test_blocks_of_any_shape_are_those_of_their_counters():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (3, 5, 4), generator=generator)
    blocks = philox(counters, (7, MAX_WORD))
    assert blocks.shape == counters.shape
    one_by_one = [philox(counter, (7, MAX_WORD)) for counter in counters.view(-1, 4)]
    assert torch.equal(blocks.view(-1, 4), torch.stack(one_by_one))
    assert not (blocks >> 32).any()
    assert philox(counters[:0], (7, 8)).shape == (0, 5, 4)


def test_each_bit_of_counter_and_key_changes_half_of_the_bits():
    """Of 128 bits 64 ± 5.7 change. Pass rule: all between 32 and 96, the mean within 2."""
    changed = []
    for bit in range(192):
        flipped = [0x12345678 + 977 * word for word in range(6)]
        before = philox(torch.tensor(flipped[:4]), flipped[4:])
        flipped[bit // 32] ^= 1 << (bit % 32)
        after = philox(torch.tensor(flipped[:4]), flipped[4:])
        changed.append(sum(int(x).bit_count() for x in before ^ after))
    assert 32 < min(changed) <= max(changed) < 96
    assert abs(np.mean(changed) - 64) < 2


@pytest.mark.parametrize(
    ("counter", "key"),
    [
        (torch.zeros(3, dtype=torch.int64), (0, 0)),
        (torch.zeros(4, dtype=torch.int32), (0, 0)),
        (torch.tensor(0), (0, 0)),
        (torch.tensor([0, 0, 0, 2**32]), (0, 0)),
        (torch.tensor([0, -1, 0, 0]), (0, 0)),
        (torch.zeros(4, dtype=torch.int64), (0, 0, 0)),
        (torch.zeros(4, dtype=torch.int64), (-1, 0)),
        (torch.zeros(4, dtype=torch.int64), (0, 2**32)),
    ],
)
def test_what_is_no_counter_or_key_is_refused(counter, key):
    with pytest.raises(ValueError, match="32-bit words"):
        philox(counter, key)


# ------------------------------------------------------------------------- one row per atom


def test_layout_of_counter_and_bits():
    """What a seed means is kept: changing this changes every run that was ever made."""
    seed, step, ids = 0x89ABCDEF_01234567, 5 * 2**32 + 9, torch.tensor([0, 77, MAX_WORD])
    counters = torch.tensor([[atom, 9, 5, 2] for atom in ids.tolist()])
    block = philox(counters, (0x01234567, 0x89ABCDEF))
    tens = torch.stack([(block[:, 3] >> shift) & 1023 for shift in (0, 10, 20)], 1)
    u = ((block[:, :3] + (tens << 32)).to(torch.float64) + 0.5) / 2.0**42
    assert torch.equal(normals(seed, THERMOSTAT, step, ids), normal_quantiles(u))


def test_numbers_of_a_seed_stay_what_they_are():
    z = normals(2024, VELOCITIES, 0, torch.tensor([0, 1000]))
    assert [x.hex() for x in z.view(-1).tolist()] == PINNED
    noise = ScalarNoise(2024, THERMOSTAT, 12)
    assert [noise.normal().hex(), noise.gamma(2.5).hex(), noise.gamma(0.5).hex()] == PINNED_SCALARS
    assert [stream.value for stream in (VELOCITIES, THERMOSTAT, Stream.BAROSTAT)] == [1, 2, 3]


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_row_depends_on_its_id_alone(n_threads):
    """Not on length, place, order, memory layout, blocks of work or threads."""
    before = torch.get_num_threads()
    ids = atoms(2 * BLOCK + 4000, first=MAX_WORD - 2 * BLOCK - 4100)
    reference = normals(3, THERMOSTAT, 10, ids)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(ids), generator=generator)
    torch.set_num_threads(n_threads)
    try:
        assert torch.equal(normals(3, THERMOSTAT, 10, ids), reference)
        assert torch.equal(normals(3, THERMOSTAT, 10, ids[order]), reference[order])
        for stride in (2, 3, 7, 100):
            some = slice(stride - 1, None, stride)
            assert not ids[some].is_contiguous()
            assert torch.equal(normals(3, THERMOSTAT, 10, ids[some]), reference[some])
        for length in (0, 1, 2, 3, 5, 8, 13, 16, 17, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1):
            for offset in (0, 1, 3, 6, 1000):
                part = slice(offset, offset + length)
                assert torch.equal(normals(3, THERMOSTAT, 10, ids[part]), reference[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_default_dtype_does_not_matter(dtype):
    reference = normals(1, THERMOSTAT, 1, atoms(1000))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        z = normals(1, THERMOSTAT, 1, atoms(1000))
    finally:
        torch.set_default_dtype(before)
    assert z.dtype == torch.float64
    assert torch.equal(z, reference)


def test_global_generators_are_neither_used_nor_changed():
    torch.manual_seed(5)
    np_state, state = np.random.get_state()[1].copy(), torch.get_rng_state()
    first = normals(1, THERMOSTAT, 1, atoms(10))
    ScalarNoise(1, THERMOSTAT, 1).gamma(0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], np_state)
    torch.manual_seed(6)
    assert torch.equal(normals(1, THERMOSTAT, 1, atoms(10)), first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_bits_of_the_cpu():
    ids = atoms(N)
    z = normals(3, THERMOSTAT, 10, ids.cuda())
    assert z.is_cuda
    assert torch.equal(z.cpu(), normals(3, THERMOSTAT, 10, ids))


# Every way in which two draws can differ; each word of counter and key takes part.
OTHERS = {
    "same": (1, THERMOSTAT, 1),
    "next seed": (2, THERMOSTAT, 1),
    "high word of seed": (1 + 2**32, THERMOSTAT, 1),
    "largest seed": (2**64 - 1, THERMOSTAT, 1),
    "stream": (1, VELOCITIES, 1),
    "other stream": (1, Stream.BAROSTAT, 1),
    "next step": (1, THERMOSTAT, 2),
    "high word of step": (1, THERMOSTAT, 1 + 2**32),
    "largest step": (1, THERMOSTAT, 2**63 - 1),
    "words exchanged": (1, THERMOSTAT, 2**32),
}


def test_no_correlation_between_seeds_streams_steps_components_and_neighbours():
    """All pairs of 10 draws × 3 components, and each with itself one id and one half later."""
    z = torch.cat([normals(*other, atoms(N)) for other in OTHERS.values()], 1).numpy()
    columns = z / np.sqrt((z**2).mean(0))
    correlations = columns.T @ columns / N
    off_diagonal = correlations[np.triu_indices(len(correlations), 1)]
    for lag in (1, N // 2):
        lagged = (columns * np.roll(columns, lag, 0)).mean(0)
        off_diagonal = np.concatenate((off_diagonal, lagged))
    # 495 numbers: one beyond 4 standard errors has a probability of 3 %.
    assert np.abs(off_diagonal).max() < 4.0 / math.sqrt(N)
    assert 0.9 < off_diagonal.std() * math.sqrt(N) < 1.1


def test_squares_are_not_correlated_either():
    z = torch.cat([normals(*other, atoms(N)) for other in OTHERS.values()], 1).numpy()
    columns = (z**2 - 1.0) / math.sqrt(2.0)
    correlations = columns.T @ columns / N
    off_diagonal = correlations[np.triu_indices(len(correlations), 1)]
    assert np.abs(off_diagonal).max() < 4.0 / math.sqrt(N)


@pytest.mark.parametrize("name", OTHERS)
def test_moments_and_distribution_of_normals(name):
    z = normals(*OTHERS[name], atoms(N, first=12345)).numpy()
    for sample in (z, *z.T):
        assert within_4_standard_errors(sample, 0.0)
        assert within_4_standard_errors(sample**2, 1.0)
        assert within_4_standard_errors(sample**3, 0.0)
        assert within_4_standard_errors(sample**4, 3.0)
        assert stats.kstest(sample.ravel(), "norm").pvalue > 0.001


def test_distribution_over_steps_of_one_atom():
    z = torch.cat([normals(1, THERMOSTAT, step, torch.tensor([4])) for step in range(3000)]).numpy()
    assert within_4_standard_errors(z, 0.0)
    assert within_4_standard_errors(z**2, 1.0)
    assert stats.kstest(z.ravel(), "norm").pvalue > 0.001
    assert np.abs((z[1:] * z[:-1]).mean(0)).max() < 4.0 / math.sqrt(len(z))


def test_leading_bits_of_the_uniform_numbers_are_fair():
    """Each of 30 is set in half of them, and no two go together, within 4 standard errors."""
    u = stats.norm.cdf(normals(9, THERMOSTAT, 0, atoms(N)).numpy()[:, 2])
    k = np.floor(u * 2**30).astype(np.int64)
    bits = (k[:, None] >> np.arange(30)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 4.0 * 0.5 / math.sqrt(N)
    together = np.corrcoef(bits.T)[np.triu_indices(30, 1)]
    assert np.abs(together).max() < 4.0 / math.sqrt(N)


def test_tails_are_filled():
    """Beyond 4 standard deviations on either side: as many as expected, within 4 √expected."""
    z = torch.cat([normals(5, THERMOSTAT, step, atoms(N)) for step in range(10)])
    expected = z.numel() * stats.norm.sf(4.0)
    for tail in (z > 4.0, z < -4.0):
        assert abs(int(tail.sum()) - expected) < 4.0 * math.sqrt(expected)


# --------------------------------------------------------------------------- for all atoms


def test_scalars_are_a_function_of_the_draw():
    first, again = ScalarNoise(4, THERMOSTAT, 7), ScalarNoise(4, THERMOSTAT, 7)
    drawn = [first.normal() for _ in range(100)]
    assert [again.normal() for _ in range(100)] == drawn
    assert first.draw == again.draw == 100
    later = ScalarNoise(4, THERMOSTAT, 7)
    later.draw = 40
    assert [later.normal() for _ in range(60)] == drawn[40:]


def test_layout_of_a_scalar():
    noise = ScalarNoise(0x89ABCDEF_01234567, Stream.BAROSTAT, 5 * 2**32 + 9)
    noise.draw = 6
    block = philox(torch.tensor([6, 9, 5, 3 + 2**31]), (0x01234567, 0x89ABCDEF))
    k = block[0] + ((block[3] & 1023) << 32)
    u = (k.to(torch.float64) + 0.5) / 2.0**42
    assert noise.normal() == float(normal_quantiles(u[None]))


def test_scalars_and_numbers_of_atoms_are_not_the_same():
    noise = ScalarNoise(1, THERMOSTAT, 1)
    scalars = torch.tensor([noise.normal() for _ in range(1000)], dtype=torch.float64)
    of_atoms = [normals(1, stream, 1, atoms(1000)) for stream in Stream]
    assert not torch.isin(scalars, torch.cat(of_atoms)).any()


def scalar_noises(n: int):
    """One for each combination of a few streams, seeds and steps, `n` in all."""
    streams = list(Stream)
    return [ScalarNoise(i % 7, streams[i % 3], i // 21) for i in range(n)]


def test_scalar_normals_are_normal():
    pairs = np.array([[noise.normal(), noise.normal()] for noise in scalar_noises(20_000)])
    assert within_4_standard_errors(pairs, 0.0)
    assert within_4_standard_errors(pairs**2, 1.0)
    assert within_4_standard_errors(pairs**4, 3.0)
    assert stats.kstest(pairs.ravel(), "norm").pvalue > 0.001
    for a, b in combinations((pairs[:, 0], pairs[:, 1], np.roll(pairs[:, 0], 1)), 2):
        assert abs((a * b).mean()) < 4.0 / math.sqrt(len(pairs))


@pytest.mark.parametrize("shape", [0.05, 0.5, 0.9, 1.0, 1.5, 4.0, 37.5, 1e3, 1e5])
def test_gamma_distribution(shape):
    """Mean and variance of a gamma distribution are its shape; twice it is χ² of 2·shape."""
    x = np.array([noise.gamma(shape) for noise in scalar_noises(20_000)])
    assert (x >= 0.0).all()
    assert within_4_standard_errors(x, shape)
    assert within_4_standard_errors((x - shape) ** 2, shape)
    assert stats.kstest(2.0 * x, "chi2", args=(2.0 * shape,)).pvalue > 0.001


def test_successive_gammas_are_independent():
    pairs = np.array([[noise.gamma(3.5), noise.gamma(3.5)] for noise in scalar_noises(20_000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 4.0 / math.sqrt(len(pairs))


@pytest.mark.parametrize("shape", [1e-300, 5e-324, 1e12])
def test_extreme_shapes_give_finite_numbers(shape):
    drawn = [noise.gamma(shape) for noise in scalar_noises(200)]
    assert all(math.isfinite(x) and x >= 0.0 for x in drawn)
    assert np.mean(drawn) == pytest.approx(shape, rel=1e-5, abs=1e-200)


def test_the_sum_of_no_squares_is_zero():
    noise = ScalarNoise(1, THERMOSTAT, 1)
    assert noise.gamma(0.0) == 0.0
    assert noise.draw == 0


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("shape", [-0.5, math.nan, math.inf])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ValueError, match="shape of a gamma distribution"):
        ScalarNoise(1, THERMOSTAT, 1).gamma(shape)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, np.float64(3)])
def test_what_is_no_seed_is_refused(seed):
    for use in (
        checked_seed,
        lambda seed: normals(seed, THERMOSTAT, 0, atoms(2)),
        lambda seed: ScalarNoise(seed, THERMOSTAT, 0),
    ):
        with pytest.raises(ValueError, match=r"0 <= seed < 2\*\*64"):
            use(seed)


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, None])
def test_what_is_no_step_is_refused(step):
    with pytest.raises(ValueError, match=r"0 <= step < 2\*\*63"):
        normals(1, THERMOSTAT, step, atoms(2))
    with pytest.raises(ValueError, match=r"0 <= step < 2\*\*63"):
        ScalarNoise(1, THERMOSTAT, step)


def test_smallest_and_largest_seed_and_step_are_accepted():
    for seed, step in ((0, 0), (2**64 - 1, 2**63 - 1)):
        assert checked_seed(seed) == seed
        assert normals(seed, THERMOSTAT, step, torch.tensor([0, MAX_WORD])).isfinite().all()
        assert math.isfinite(ScalarNoise(seed, THERMOSTAT, step).normal())


@pytest.mark.parametrize("ids", [[0, -1], [2**32, 5], [-(2**63)], [2**63 - 1]])
def test_ids_out_of_range_are_refused(ids):
    with pytest.raises(ValueError, match=f"got {min(ids)} to {max(ids)}"):
        normals(1, THERMOSTAT, 1, torch.tensor(ids))


@pytest.mark.parametrize(
    "ids", [torch.zeros(3, dtype=torch.int32), torch.zeros(3), torch.zeros((3, 1)).long()]
)
def test_ids_of_another_kind_are_refused(ids):
    with pytest.raises(ValueError, match=r"ids \(n,\) int64"):
        normals(1, THERMOSTAT, 1, ids)

"""The digest sees every flip, swap, payload and shape, and says where two tensors differ."""

import random

import pytest

torch = pytest.importorskip("torch")

from scout import signature  # noqa: E402

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
PINNED = 115147304763115806693668714299173697625
SIZES = (1, 2, 3, 5, 7, 8, 63, 512, 2047, 2048, 2049, 8191, 65_536, 262_147)


def filled(size, dtype, seed=0):
    """A tensor whose bytes are random, so that every kind of value is among them."""
    draw = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (size * width,), dtype=torch.uint8, generator=draw).view(dtype)


def flip(tensor, byte, bit):
    tensor.view(torch.uint8)[byte] ^= 1 << bit


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_of_an_element_counts_at_any_size(dtype, size):
    """A sign flip in a large weight is certified as healthy."""
    tensor = filled(size, dtype)
    before = signature.sign(tensor)
    width = tensor.element_size()
    for element in {0, size // 2, size - 1, random.Random(size).randrange(size)}:
        for bit in range(8 * width):
            flip(tensor, element * width + bit // 8, bit % 8)
            assert signature.sign(tensor) != before, (element, bit)
            flip(tensor, element * width + bit // 8, bit % 8)
    assert signature.sign(tensor) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_bit_by_bit(dtype):
    """A peer that trains in another precision is not protected."""
    tensor = filled(3001, dtype)
    before = signature.sign(tensor)
    for byte in random.Random(1).sample(range(tensor.numel() * tensor.element_size()), 60):
        for bit in range(8):
            flip(tensor, byte, bit)
            assert signature.sign(tensor) != before
            flip(tensor, byte, bit)


def test_two_flips_and_swaps_in_any_places_count():
    """Two equal corruptions cancel each other out, or a permuted tensor passes for the true one."""
    draw = random.Random(2)
    for trial in range(600):
        tensor = filled(5000, torch.bfloat16, trial)
        before = signature.sign(tensor)
        near = draw.randrange(4000)
        one, other = near, near + draw.choice((1, 2, 4, 16, 900))
        bit = draw.choice((15, 14, 7, 0))
        changed = tensor.clone()
        for element in (one, other):
            flip(changed, 2 * element + bit // 8, bit % 8)
        assert signature.sign(changed) != before
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        if tensor.view(torch.int16)[one] != tensor.view(torch.int16)[other]:
            assert signature.sign(swapped) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_structured_corruption_counts(dtype):
    """A stuck lane or a flipped block is invisible because its many changes cancel."""
    tensor = filled(512 * 512, dtype).view(512, 512)
    before = signature.sign(tensor)
    top = 8 * tensor.element_size() - 1
    for rows, columns in (
        (slice(None), slice(1, 2)),
        (slice(0, 64), slice(0, 64)),
        (slice(3, 4), slice(None)),
        (slice(7, 8), slice(16, 32)),
        (slice(None), slice(None)),
        (slice(0, None, 2), slice(0, None, 2)),
    ):
        changed = tensor.clone()
        integers = changed.view({31: torch.int32, 15: torch.int16}[top])
        integers[rows, columns] ^= -(1 << top)
        assert signature.sign(changed) != before


def test_sign_of_zero_and_nan_payload_count():
    """Values that compare equal, or never do, hide a difference of bits."""
    assert signature.sign(torch.tensor([0.0])) != signature.sign(torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    loud = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert len({signature.sign(it) for it in (quiet, other, loud)}) == 3
    assert signature.sign(0.0) != signature.sign(-0.0)


def test_shape_dtype_and_length_count():
    """A reshaped, reinterpreted or truncated state is taken for the same."""
    zeros = torch.zeros(64, dtype=torch.int32)
    alike = [zeros, zeros.view(8, 8), zeros.view(torch.float32), zeros[:63], zeros.to(torch.int64)]
    alike += [torch.zeros(0), torch.zeros(0, 3), torch.zeros(1024 * 2), torch.zeros(1024 * 4)]
    assert len({signature.sign(it) for it in alike}) == len(alike)


def test_layout_in_memory_and_threads_do_not_count():
    """Two healthy peers differ because one holds its weight transposed."""
    tensor = filled(300_000, torch.float32).view(500, 600)
    expected = signature.sign(tensor)
    assert signature.sign(tensor.t().contiguous().t()) == expected
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(500, 600)
    assert signature.sign(shifted) == expected
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert signature.sign(tensor) == expected
    torch.set_num_threads(threads)


def test_tensors_are_signed_alike_together_and_alone():
    """A batch of surfaces would not compare with one that is batched otherwise."""
    tensors = [filled(size, torch.float32, size) for size in (1, 2048, 0, 5000, 3)]
    together = signature.sign_tensors(tensors)
    alone = torch.cat([signature.sign_tensors([it]) for it in tensors])
    assert torch.equal(together, alone)


def test_structures_are_told_apart():
    """Two states with their tensors exchanged, nested otherwise or keyed otherwise look alike."""
    one, two = torch.ones(3), torch.zeros(3)
    different = [
        {"a": one, "b": two},
        {"a": two, "b": one},
        [one, two],
        (one, two),
        [[one], two],
        [one, [two]],
        {"a": one, "b": two, "step": 1},
        {"a": one, "b": two, "step": 1.0},
        {"a": one, "b": two, "step": True},
        {"a": one, "b": two, "step": "1"},
    ]
    assert len({signature.sign(it) for it in different}) == len(different)
    assert signature.sign({"b": two, "a": one}) == signature.sign({"a": one, "b": two})


def test_what_cannot_be_signed_is_said():
    """A state of which a part was skipped is called equal."""
    with pytest.raises(TypeError, match="a object has no signature"):
        signature.sign([object()])
    with pytest.raises(TypeError, match="sign its parts"):
        signature.sign(torch.eye(3).to_sparse())
    cycle = []
    cycle.append(cycle)
    with pytest.raises(TypeError, match="nested over"):
        signature.sign(cycle)


def test_rows_say_where_tensors_differ():
    """Whoever looks for a stuck bit has to compare gigabytes by hand."""
    tensor = filled(1 << 16, torch.float32)
    changed = tensor.clone()
    for element in (5, 2047, 2048, 60_000):
        flip(changed, 4 * element, 3)
    rows = signature.row_sums(tensor), signature.row_sums(changed)
    assert signature.differing_bytes(*rows) == ((0, 16_384), (237_568, 245_760))
    assert signature.differing_bytes(rows[0], rows[0]) == ()
    with pytest.raises(ValueError, match="cannot be compared"):
        signature.differing_bytes(rows[0], rows[1][:1])


def test_gradients_and_parameters_are_left_alone():
    """Signing a parameter adds to its graph, or changes it."""
    parameter = torch.nn.Parameter(filled(5000, torch.float32))
    before = parameter.detach().clone()
    assert signature.sign_tensors([parameter]).grad_fn is None
    assert torch.equal(parameter.detach().view(torch.int32), before.view(torch.int32))


def test_the_digest_stays_what_it_is():
    """Ranks of two releases in one job call each other corrupt; a stored digest means nothing."""
    assert signature.sign(torch.arange(5000, dtype=torch.int32)) == PINNED

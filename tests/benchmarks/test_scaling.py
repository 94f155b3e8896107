"""The model of ``python -m benchmarks.scaling``, compared with manual calculations and with known limits."""

from itertools import pairwise

import pytest

from benchmarks.scaling_costs import EXCHANGES, RING, TREE, TWO_LEVELS, Compressions, Training, costs_of, thin_share
from benchmarks.scaling_model import (
    BUCKET_NUM_BYTES,
    FIRST_BUCKET_NUM_BYTES,
    Bucket,
    Cluster,
    Computation,
    Link,
    Sample,
    all_gather,
    bucket_sizes,
    contended,
    efficiency,
    fit,
    halving_doubling,
    ring,
    step,
    two_levels,
)

#: One second per message and a millisecond per byte, for simple arithmetic.
LINK = Link(1.0, 1e-3)
FREE = Link(0.0, 0.0)
NO_LATENCY = Link(0.0, 1e-3)
GIVEN = Compressions(thin_share=0.01)


def test_a_link_is_given_in_the_units_of_networks():
    link = Link.of(latency_us=50, bandwidth_gbit=10)
    assert link.messages_s(1, 1.25e9) == pytest.approx(1 + 50e-6)
    assert (link.latency_us, link.bandwidth_gbit) == pytest.approx((50, 10))


def test_a_ring_of_p_ranks_has_2_p_minus_2_steps_of_one_pth_of_the_message():
    assert ring(4, 1000, LINK) == pytest.approx(6 * 1 + 6 * 0.25)
    assert ring(1, 1000, LINK) == 0


def test_a_ring_and_a_tree_of_two_ranks_are_the_same():
    assert ring(2, 1000, LINK) == pytest.approx(2 + 1)
    assert halving_doubling(2, 1000, LINK) == pytest.approx(2 + 1)


def test_a_ring_sends_less_than_twice_the_bytes_of_the_message():
    times = [ring(num_ranks, 1000, NO_LATENCY) for num_ranks in (2, 4, 64, 4096)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2, rel=1e-3)
    assert times[-1] < 2


def test_a_tree_has_the_bytes_of_a_ring_and_fewer_messages():
    assert halving_doubling(8, 1000, LINK) == pytest.approx(6 + 1.75)
    assert halving_doubling(64, 1000, NO_LATENCY) == pytest.approx(ring(64, 1000, NO_LATENCY))
    assert halving_doubling(1024, 0, LINK) == 20
    assert ring(1024, 0, LINK) == 2046


def test_a_tree_of_ranks_that_are_no_power_of_two_has_two_more_messages_of_all_bytes():
    assert halving_doubling(6, 1000, LINK) == pytest.approx(4 + 1.5 + 2 + 2)


def test_the_bytes_of_all_gather_grow_with_the_number_of_ranks():
    assert all_gather(5, 1000, LINK) == pytest.approx(4 + 4)


def test_two_levels_with_one_rank_per_host_are_one_level():
    assert two_levels(Cluster(8, 1, FREE, LINK), 1000) == pytest.approx(ring(8, 1000, LINK))


def test_two_levels_on_one_host_are_one_level():
    assert two_levels(Cluster(1, 8, LINK, FREE), 1000) == pytest.approx(ring(8, 1000, LINK))


def test_two_levels_by_hand():
    # Intra-host: 2 * (3 messages of 250 bytes). Inter-host: two messages of 125 bytes at a quarter of the bandwidth.
    assert two_levels(Cluster(2, 4, LINK, LINK), 1000) == pytest.approx(2 * (3 + 0.75) + 2 * (1 + 0.125 * 4))


def test_the_ranks_of_a_host_share_its_network_link():
    times = [two_levels(Cluster(4, num_ranks, FREE, NO_LATENCY), 1000) for num_ranks in (1, 2, 8)]
    assert times == pytest.approx([1.5] * 3)


def test_a_cluster_has_whole_hosts():
    assert Cluster.of_ranks(4, 8, LINK, LINK) == Cluster(1, 4, LINK, LINK)
    assert Cluster.of_ranks(24, 8, LINK, LINK).num_hosts == 3
    with pytest.raises(ValueError, match="do not fill a whole number of hosts"):
        Cluster.of_ranks(12, 8, LINK, LINK)


def test_a_fit_recovers_the_latency_and_the_bandwidth_of_a_link():
    samples = [Sample(2, size, LINK.messages_s(2, size)) for size in (4, 1000, 10**6)]
    found = fit(samples)
    assert (found.latency_s, found.s_per_byte) == pytest.approx((LINK.latency_s, LINK.s_per_byte))


def test_a_link_has_no_negative_latency():
    assert fit([Sample(2, 1000, 0.5), Sample(2, 10_000, 10.0)]).latency_s == 0


def test_a_fit_of_a_link_needs_two_message_sizes():
    with pytest.raises(ValueError, match="two different sizes"):
        fit([Sample(2, 1000, 3.0), Sample(2, 1000, 3.1)])


def test_gradients_are_exchanged_in_a_short_bucket_and_long_ones():
    sizes = list(bucket_sizes(60e6))
    assert sizes[:3] == [FIRST_BUCKET_NUM_BYTES, BUCKET_NUM_BYTES, BUCKET_NUM_BYTES]
    assert sum(sizes) == pytest.approx(60e6)


#: Two seconds, then a backward pass of three, with gradients after one and after three.
COMPUTATION = Computation(2.0, 3.0, (Bucket(1000, 1.0), Bucket(500, 3.0)))


@pytest.mark.parametrize(
    ("s_per_byte", "overlapped", "one_after_the_other"),
    [
        (0.0, 5.0, 5.0),
        (1e-3, 5.5, 6.5),  # the first bucket is finished when the last bucket is ready
        (4e-3, 2 + 1 + 4 + 2, 5 + 6),  # the last bucket waits for the first bucket
    ],
)
def test_a_step_by_hand(s_per_byte, overlapped, one_after_the_other):
    def cost(num_bytes):
        return num_bytes * s_per_byte

    assert step(COMPUTATION, cost) == pytest.approx(overlapped)
    assert step(COMPUTATION, cost, overlaps=False) == pytest.approx(one_after_the_other)
    assert step(COMPUTATION, cost, rare_s=0.25) == pytest.approx(overlapped + 0.25)


def test_buckets_are_ready_at_equal_intervals_and_the_last_one_at_the_end():
    computation = Computation.of(3.0, 60e6)
    assert computation.seconds == pytest.approx(3)
    assert computation.backward_s == pytest.approx(2)
    assert computation.buckets[0].ready_s == pytest.approx(2 * FIRST_BUCKET_NUM_BYTES / 60e6)
    assert computation.buckets[-1].ready_s == pytest.approx(2)


def test_ranks_that_share_cores_take_turns():
    assert [contended(0.1, num_ranks, 2) for num_ranks in (1, 2, 8)] == pytest.approx([0.1, 0.1, 0.4])


def test_efficiency_is_relative_to_the_throughput_of_one_rank():
    assert efficiency(0.1, 0.4) == pytest.approx(0.25)


def training(between: Link) -> Training:
    """Returns the model of a training with 10^8 parameters and eight ranks per host."""
    return Training(0.3, Computation.of(0.3, 4e8), 4e8, 8, Link.of(5, 200), between, GIVEN)


@pytest.mark.parametrize("name", EXCHANGES)
def test_more_ranks_are_never_more_efficient_and_overlap_never_costs(name):
    job = training(Link.of(30, 10))
    hosts = [8 * 2**power for power in range(1, 10)]
    for overlaps in (True, False):
        reached = [job.efficiency(name, number, overlaps=overlaps) for number in hosts]
        assert all(after <= before + 1e-12 for before, after in pairwise(reached))
    for number in (2, 4, 8, *hosts):
        assert job.step_s(name, number, overlaps=True) <= job.step_s(name, number, overlaps=False) + 1e-12


def test_compression_costs_as_two_levels_with_fewer_bytes_between_hosts():
    cluster = Cluster(4, 2, FREE, NO_LATENCY)
    num_bytes = 10**8
    whole, _ = costs_of(TWO_LEVELS, cluster, num_bytes, GIVEN)
    bf16, powersgd, topk = (costs_of(name, cluster, num_bytes, GIVEN)[0] for name in ("bf16", "powersgd", "topk"))
    assert bf16(num_bytes) == pytest.approx(whole(num_bytes) / 2)
    assert powersgd(num_bytes) == pytest.approx(whole(num_bytes) * GIVEN.thin_share)
    # A hundredth of the gradients, with their indices, from each of the other hosts.
    assert topk(num_bytes) == pytest.approx(3 * num_bytes * 0.02 * 1e-3)


def test_short_sums_are_made_in_one_shot_over_gloo():
    cluster = Cluster(4, 1, FREE, LINK)
    # Two messages of 5 bytes to each of three other ranks; a ring has six messages of a quarter, and a tree has four.
    assert costs_of("powersgd", cluster, 1000, GIVEN)[0](1000) == pytest.approx(2 * 3 * (1 + 0.005))
    by_tree = costs_of("powersgd", cluster, 1000, GIVEN, halving_doubling)[0](1000)
    assert by_tree == pytest.approx(2 * (4 + 1.5 * 0.005))


def test_the_largest_gradients_of_many_are_more_than_all_gradients():
    slow = training(Link.of(0, 1))
    assert slow.efficiency("topk", 16) > slow.efficiency(TWO_LEVELS, 16)
    assert slow.efficiency("topk", 4096) < slow.efficiency(TWO_LEVELS, 4096)


def test_a_tree_is_two_levels_with_a_tree_at_both():
    cluster = Cluster(2, 2, LINK, LINK)
    cost, _ = costs_of(TREE, cluster, 1000, GIVEN)
    assert cost(1000) == pytest.approx(two_levels(cluster, 1000))  # with two ranks, a tree is a ring


def test_models_are_exchanged_once_in_a_period():
    cluster = Cluster(4, 2, NO_LATENCY, NO_LATENCY)
    in_each_step, rare_s = costs_of("localsgd", cluster, 1000, Compressions(1, period=10))
    assert in_each_step(1000) == pytest.approx(ring(2, 1000, NO_LATENCY))
    assert rare_s == pytest.approx(two_levels(cluster, 1000) / 10)
    drifting, _ = costs_of("localsgd", Cluster(1, 8, NO_LATENCY, FREE), 1000, Compressions(1))
    assert drifting(1000) == 0


def test_the_time_of_the_compression_is_part_of_the_step():
    without, with_it = training(FREE), training(FREE)
    with_it = Training(**{**vars(with_it), "compressions": Compressions(0.01, seconds={"powersgd": 0.1})})
    assert with_it.step_s("powersgd", 64, overlaps=True) == pytest.approx(
        without.step_s("powersgd", 64, overlaps=True) + 0.1
    )
    assert with_it.step_s(RING, 64, overlaps=True) == without.step_s(RING, 64, overlaps=True)


def test_thin_matrices_by_hand():
    # 2 * (100 + 50) of 5000, and a vector, which is not compressed.
    assert thin_share([(100, 50), (100,)], 2) == pytest.approx((300 + 100) / 5100)
    assert thin_share([(10, 5, 2)], 3) == pytest.approx(60 / 100)


def test_the_choice_is_what_changes_the_training_least():
    assert training(Link.of(1, 800)).choice(64, enough=0.9)[0] == "plain"
    assert training(Link.of(30, 1)).choice(64, enough=0.9)[0] == "powersgd"
    assert training(Link.of(5000, 10)).choice(64, enough=0.9)[0] == "localsgd"
    names = [training(Link.of(30, rate)).choice(64, enough=0.9)[0] for rate in (1, 10, 25, 50, 100, 800)]
    assert names == sorted(names, key=["powersgd", "bf16", "plain"].index)


def test_the_choice_is_the_fastest_exchange_if_none_is_efficient_enough():
    job = training(Link.of(30, 0.05))
    name, reached = job.choice(64, enough=0.9)
    assert reached < 0.9
    assert reached == max(job.efficiency(each, 64) for each in ("bf16", "powersgd", "localsgd", RING))
    assert name == "powersgd"

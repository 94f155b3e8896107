"""Step time and efficiency for 2 to 4,096 ranks, predicted from latency, bandwidth and computation.

    python -m benchmarks.scaling            # measures here, predicts, and compares predictions with measured steps
    python -m benchmarks.scaling --quick
    python -m benchmarks.scaling --latency-us 30 --bandwidth-gbit 10 100 --compute-ms 300 --parameters 1e8

The last command takes the figures of a cluster, and only predicts.

The model is that of :mod:`benchmarks.scaling_model`: alpha + n * beta seconds per message, algorithms that are sums of
messages, and buckets of gradients that are exchanged during the backward pass or after it. Efficiency is the efficiency
of weak scaling: the step time of one rank alone over the step time of all ranks.

Comparison with measurements: ranks train with ``ddp_ext``, 2, 4, and 8 ranks on this host over ``shm``, ranks on 2 and
4 hosts over gloo, and two ranks on each of 2 hosts with a hierarchical exchange. Hosts are network namespaces with a
limited network rate, which requires root (see :mod:`benchmarks.network_namespaces`). Otherwise, these cases are
omitted. In the same processes, alpha and beta are fitted to all-reduces of several sizes, never to steps. The values of
two hosts are also used for four hosts. Ranks here share two cores, so the computation is measured while the same number
of ranks computes: the same training with a hook that exchanges nothing, in turn with the others, round by round. The
time of compression is measured separately. Errors are relative to the measured median; 15 % are allowed.

Ranks of one host exchange on the cores that compute. For them, alpha and beta are therefore measured with all ranks at
the same time, and exchanges do not overlap with computation. The same holds for exchanges between hosts that begin with
an exchange inside each host, or compute between messages, as PowerSGD does. This is a property of this machine, not of
the model.
"""

import argparse
import os
import sys
from statistics import median
from typing import Any

from benchmarks.network_namespaces import NoHostsError
from benchmarks.plots import draw_plot
from benchmarks.report import environment, parse, write_json
from benchmarks.scaling_costs import BF16, LOCALSGD, POWERSGD, Compressions, Training, thin_share
from benchmarks.scaling_model import Computation, Link, halving_doubling, ring
from benchmarks.scaling_rank import COMPUTE, PLAIN, Job, Stack
from benchmarks.scaling_runs import Case, measure
from benchmarks.scaling_tables import (
    choices,
    described,
    held_against,
    predictions,
    ranks_of,
    show_choices,
    show_computation,
    show_held,
    show_links,
    show_predictions,
)

#: Message sizes in bytes. Below some hundred bytes, gloo's ring has empty parts, which it does not send.
SIZES = (2**10, 2**12, 2**16, 2**20, 2**22, 2**24, 2**25)
#: Number of hosts, number of ranks per host, exchanges.
CASES = (
    (1, 1, ()),
    (1, 2, (PLAIN,)),
    (1, 4, (PLAIN,)),
    (1, 8, (PLAIN,)),
    (2, 1, (PLAIN, BF16, POWERSGD, LOCALSGD)),
    (4, 1, (PLAIN, BF16, POWERSGD, LOCALSGD)),
    (2, 2, (PLAIN, BF16)),
)
QUICK_CASES = ((1, 1, ()), (1, 2, (PLAIN,)), (2, 1, (PLAIN, BF16)))
#: Default number of columns of PowerSGD's thin matrices.
POWERSGD_RANK = 2


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cluster = parser.add_argument_group("figures of a cluster; the first four are required together")
    cluster.add_argument("--latency-us", type=float, help="latency of a message between hosts, in microseconds")
    cluster.add_argument("--bandwidth-gbit", type=float, nargs="+", help="bandwidth of a host, in 10^9 bits per second")
    cluster.add_argument("--compute-ms", type=float, help="computation of a step without exchanges, in milliseconds")
    cluster.add_argument("--parameters", type=float, help="number of parameters of the model, in float32")
    cluster.add_argument("--ranks-per-host", type=int, default=8)
    cluster.add_argument("--inside-latency-us", type=float, default=5, help="latency of a message inside a host")
    cluster.add_argument(
        "--inside-bandwidth-gbit", type=float, default=200, help="bandwidth between two ranks of a host"
    )
    cluster.add_argument(
        "--backward-share", type=float, default=2 / 3, help="share of the backward pass in the step without exchanges"
    )
    cluster.add_argument("--matrix-width", type=float, default=1024, help="width of square matrices, for PowerSGD")
    cluster.add_argument("--powersgd-ms", type=float, default=0, help="time of compression per step")
    cluster.add_argument(
        "--between", choices=["ring", "tree"], default="ring", help="algorithm between hosts; gloo has rings only"
    )
    group = parser.add_argument_group("measurements on this machine")
    group.add_argument(
        "--rate", type=float, default=1000, help="rate of a host, in megabits per second; 0 for no limit"
    )
    group.add_argument("--rounds", type=int, default=3)
    group.add_argument("--width", type=int, default=1024, help="width of the layers of the model")
    group.add_argument("--layers", type=int, default=6, help="number of layers of that width")
    group.add_argument("--batch-size", type=int, default=128, help="samples per rank and step")
    group.add_argument("--bucket-mb", type=float, default=8, help="gradients exchanged at once, in mebibytes")
    group.add_argument("--timeout", type=float, default=600, help="time limit of a case, in seconds")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[16, 64, 256, 1024, 4096],
        help="numbers of ranks for which an exchange is recommended",
    )
    parser.add_argument("--enough", type=float, default=0.9, help="efficiency that the recommendations require")
    arguments = parse(parser, "one round of a small model", rounds=1, width=256, layers=4)
    given = [arguments.latency_us, arguments.bandwidth_gbit, arguments.compute_ms, arguments.parameters]
    if any(one is not None for one in given) and None in given:
        parser.error("--latency-us, --bandwidth-gbit, --compute-ms and --parameters must be given together")
    if arguments.ranks_per_host < 1 or any(number % arguments.ranks_per_host for number in arguments.ranks):
        parser.error(f"--ranks must be multiples of --ranks-per-host, {arguments.ranks_per_host}")
    return arguments


def trainings_of(arguments: argparse.Namespace) -> dict[str, Training]:
    """Returns the trainings of a cluster, by network."""
    seconds, num_bytes = arguments.compute_ms / 1e3, 4 * arguments.parameters
    width = arguments.matrix_width
    compressions = Compressions(
        thin_share([(width, width)], POWERSGD_RANK), seconds={POWERSGD: arguments.powersgd_ms / 1e3}
    )
    return {
        f"{bandwidth:g} Gbit/s, {arguments.latency_us:g} us": Training(
            seconds,
            Computation.of(seconds, num_bytes, arguments.backward_share),
            num_bytes,
            arguments.ranks_per_host,
            Link.of(arguments.inside_latency_us, arguments.inside_bandwidth_gbit),
            Link.of(arguments.latency_us, bandwidth),
            compressions,
            {"ring": ring, "tree": halving_doubling}[arguments.between],
        )
        for bandwidth in arguments.bandwidth_gbit
    }


def predict(arguments: argparse.Namespace) -> None:
    """Predicts for a cluster."""
    trainings = trainings_of(arguments)
    for label, training in trainings.items():
        show_predictions(label, training)
    chosen = choices(trainings, arguments.ranks, arguments.enough)
    show_choices(chosen, arguments.ranks, arguments.enough)
    results = {
        label: {"given": described(training), "predictions": predictions(training)}
        for label, training in trainings.items()
    }
    draw_plot(write_json(arguments.output, "scaling_cluster", {"results": results, "choices": chosen}))


def measure_all(arguments: argparse.Namespace, job: Job) -> list[Case]:
    """Measures all cases that this machine permits."""
    cases = []
    for num_hosts, num_ranks, exchanges in QUICK_CASES if arguments.quick else CASES:
        one = Job(**{**vars(job), "num_hosts": num_hosts, "num_ranks": num_ranks, "exchanges": exchanges})
        try:
            cases.append(measure(one, arguments.rate, arguments.timeout))
        except NoHostsError as error:
            print(f"omitted, {num_hosts} hosts: {error}", file=sys.stderr, flush=True)
        else:
            print(f"measured {cases[-1].label}", file=sys.stderr, flush=True)
    return cases


def measure_and_predict(arguments: argparse.Namespace) -> None:
    """Measures on this machine, predicts, and compares predictions with measurements."""
    sizes = SIZES[:-2] if arguments.quick else SIZES
    model = arguments.width, arguments.layers, arguments.batch_size, arguments.bucket_mb
    job = Job(1, 1, (), arguments.rounds, sizes, *model)
    shapes = [tuple(parameter.shape) for parameter in Stack(job).parameters()]
    num_bytes = 4.0 * sum(parameter.numel() for parameter in Stack(job).parameters())
    cases = measure_all(arguments, job)
    alone_s, num_cores = median(cases[0].steps[COMPUTE]), environment()["cores"]
    by_shape = {(case.num_hosts, case.num_ranks): case for case in cases[1:]}
    links = {
        case.label: (case.link(), case.fit_error(case.link())) for case in by_shape.values() if not case.has_two_levels
    }
    inside = by_shape[1, 2].link()
    # Without namespaces, links between hosts are assumed to equal links between ranks of a host.
    between = by_shape[2, 1].link() if (2, 1) in by_shape else inside

    def training_of(case: Case) -> Training:
        own = case.link() if case.num_hosts == 1 else inside.shared_by(max(1, case.world_size // num_cores))
        compressions = Compressions(thin_share(shapes, POWERSGD_RANK), seconds=case.compression)
        return Training(
            alone_s, case.computation, num_bytes, case.num_ranks, own, between, compressions, apart=case.apart
        )

    held = [row for case in by_shape.values() for row in held_against(case, training_of(case))]
    show_links(links)
    show_computation(cases, alone_s, num_cores)
    show_held(held)
    measured = training_of(by_shape[1, 2])
    if (2, 1) in by_shape:
        compressions = Compressions(thin_share(shapes, POWERSGD_RANK), seconds=by_shape[2, 1].compression)
        measured = Training(**{**vars(measured), "compressions": compressions})
    label = f"{measured.ranks_per_host} ranks per host, {arguments.rate / 1000:g} Gbit/s"
    show_predictions(label, measured)
    numbers = [number for number in arguments.ranks if number in ranks_of(measured)]
    chosen = choices({label: measured}, numbers, arguments.enough)
    show_choices(chosen, numbers, arguments.enough)
    payload: dict[str, Any] = {
        "settings": {**vars(job), "rate_mbit": arguments.rate, "num_bytes": num_bytes},
        "links": {name: {**vars(link), "largest_misfit": fit_error} for name, (link, fit_error) in links.items()},
        "held": held,
        "given": described(measured),
        "predictions": predictions(measured),
        "choices": chosen,
        "measured": [
            {"case": case.label, "messages_s": case.messages, "compression_s": case.compression, "steps_s": case.steps}
            for case in cases
        ],
    }
    draw_plot(write_json(arguments.output, "scaling", payload))


def main() -> None:
    """Measures, or reads figures; prints the tables, writes the JSON file, and draws the plots."""
    os.environ["OMP_NUM_THREADS"] = "1"
    arguments = parse_arguments()
    if arguments.latency_us is None:
        measure_and_predict(arguments)
    else:
        predict(arguments)


if __name__ == "__main__":
    main()

"""Resources of workers on Ray: checks of the strategy's arguments, and whether a cluster can ever run the workers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

PlacementStrategy = Literal["PACK", "SPREAD"]

#: Granularity of Ray's amounts of resources.
_STEP = 1e-4


@dataclass(frozen=True)
class ResourceDemand:
    """Resources of each worker, and the placement of workers on hosts.

    Attributes:
        num_cpus: CPUs per worker; a fraction if several workers share one.
        num_gpus: GPUs per worker.
        resources: Further resources per worker, by their names in the cluster.
        placement_strategy: "PACK" places workers on as few hosts as possible, "SPREAD" on as many.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement_strategy: PlacementStrategy = "PACK"

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker, as a bundle of a Ray placement group."""
        needed = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.resources}
        return {name: amount for name, amount in needed.items() if amount}

    def check_fits(self, num_workers: int, hosts: Sequence[Mapping[str, float]], cluster: str) -> None:
        """Rejects more workers than the cluster can ever run at once.

        Args:
            num_workers: Number of workers.
            hosts: Resources of each host of the cluster.
            cluster: Name of the cluster in the error message.

        Raises:
            ValueError: If the workers do not fit; the message has the numbers.
        """
        for name, amount in self.bundle.items():
            needed, available = amount * num_workers, sum(host.get(name, 0.0) for host in hosts)
            if needed > available + _STEP:
                raise ValueError(
                    f"`num_workers={num_workers}` workers with `{self._argument(name)}` need"
                    f" {_amount_text(name, needed)}, but {cluster} has {available:g}. Request fewer workers, or less"
                    " per worker (with a fraction, several workers share one), or add hosts to the cluster."
                )
        capacities = [
            min((math.floor(host.get(name, 0.0) / amount + _STEP) for name, amount in self.bundle.items()), default=0)
            for host in hosts
        ]
        if sum(capacities) < num_workers:
            needs = " and ".join(_amount_text(name, amount) for name, amount in self.bundle.items())
            raise ValueError(
                f"`num_workers={num_workers}` workers that each need {needs} do not fit into {cluster}: its"
                f" {len(hosts)} hosts can run {' + '.join(map(str, capacities))} of them, because a worker cannot"
                " span hosts. Request fewer workers, or less per worker."
            )

    def _argument(self, name: str) -> str:
        if name in ("CPU", "GPU"):
            return f"num_{name.lower()}s_per_worker={self.bundle[name]:g}"
        return f"resources_per_worker={{{name!r}: {self.resources[name]:g}}}"


def check_resource_arguments(
    num_workers: Any, num_cpus: Any, num_gpus: Any, resources: Any, placement_strategy: Any
) -> None:
    """Checks the strategy's arguments about workers, without a cluster.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is invalid.
    """
    if num_workers is not None and (not isinstance(num_workers, int) or isinstance(num_workers, bool)):
        raise TypeError(f"`num_workers` must be an int or None, got {num_workers!r}.")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"`num_workers={num_workers!r}` must be at least 1.")
    resources = {} if resources is None else resources
    if not isinstance(resources, Mapping):
        raise TypeError(f"`resources_per_worker` must be a dict such as {{'fast': 1}}, got {resources!r}.")
    for name in ("CPU", "GPU"):
        if name in resources:
            raise ValueError(f"`resources_per_worker` contains {name!r}. Use `num_{name.lower()}s_per_worker` instead.")
    amounts = {"num_cpus_per_worker": num_cpus, "num_gpus_per_worker": 0 if num_gpus is None else num_gpus}
    amounts.update({f"resources_per_worker[{name!r}]": amount for name, amount in resources.items()})
    for name, amount in amounts.items():
        if not isinstance(amount, (int, float)) or isinstance(amount, bool):
            raise TypeError(f"`{name}` must be a number, got {amount!r}.")
        if not 0 <= amount < math.inf:
            raise ValueError(f"`{name}={amount!r}` must be finite and not negative.")
        if amount > 1 and amount != int(amount):
            raise ValueError(f"`{name}={amount!r}`: Ray supports fractions only below 1. Use a whole number.")
    if not num_cpus:
        raise ValueError(
            "`num_cpus_per_worker=0`: a worker requires CPU time. Use a fraction if several workers share a CPU."
        )
    if placement_strategy not in get_args(PlacementStrategy):
        raise ValueError(
            f"`placement_strategy={placement_strategy!r}` must be 'PACK' (few hosts) or 'SPREAD' (many hosts)."
        )


def _amount_text(name: str, amount: float) -> str:
    if name in ("CPU", "GPU"):
        return f"{amount:g} {name}{'s' * (amount != 1)}"
    return f"{amount:g} of {name!r}"

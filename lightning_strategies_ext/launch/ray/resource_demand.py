"""What workers need of a cluster, and whether it has that. It knows Ray's names of resources, and not Ray."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

PlacementStrategy = Literal["PACK", "SPREAD"]

#: Ray counts resources in steps of this.
_STEP = 1e-4


@dataclass(frozen=True)
class ResourceDemand:
    """What each worker needs, and where workers are put.

    Attributes:
        num_cpus: CPUs of a worker, a fraction if several share one.
        num_gpus: GPUs of a worker.
        resources: Further resources of a worker, by their names in the cluster.
        placement: "PACK" puts workers on as few hosts as possible, "SPREAD" on as many.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement_strategy: PlacementStrategy = "PACK"

    @property
    def bundle(self) -> dict[str, float]:
        """Of one worker, as Ray writes it."""
        needed = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.resources}
        return {name: amount for name, amount in needed.items() if amount}

    def check_fits(self, num_workers: int, hosts: Sequence[Mapping[str, float]], cluster: str) -> None:
        """Refuses more workers than there can ever be at once.

        Args:
            num_workers: How many there should be.
            hosts: The resources of each host of the cluster.
            cluster: What to call it.

        Raises:
            ValueError: If they do not fit; with the numbers.
        """
        for name, amount in self.bundle.items():
            needed, there = amount * num_workers, sum(host.get(name, 0.0) for host in hosts)
            if needed > there + _STEP:
                raise ValueError(
                    f"`num_workers={num_workers}` workers with `{self._argument(name)}` each need {needed:g}"
                    f" {_resource_text(name, needed)}, and {cluster} has {there:g}. Ask for fewer workers, or for less"
                    " for each (a fraction lets several share one), or add hosts to the cluster."
                )
        places = [
            min((math.floor(host.get(name, 0.0) / amount + _STEP) for name, amount in self.bundle.items()), default=0)
            for host in hosts
        ]
        if sum(places) < num_workers:
            raise ValueError(
                f"`num_workers={num_workers}` workers that each need {self._text()} do not fit into {cluster}: its"
                f" {len(hosts)} hosts have room for {' + '.join(map(str, places))} of them. A worker is on one host."
            )

    def _argument(self, name: str) -> str:
        if name == "CPU":
            return f"num_cpus_per_worker={self.num_cpus:g}"
        if name == "GPU":
            return f"num_gpus_per_worker={self.num_gpus:g}"
        return f"resources_per_worker={{{name!r}: {self.resources[name]:g}}}"

    def _text(self) -> str:
        return " and ".join(f"{amount:g} {_resource_text(name, amount)}" for name, amount in self.bundle.items())


def check_resource_arguments(num_workers: Any, num_cpus: Any, num_gpus: Any, resources: Any, placement: Any) -> None:
    """Refuses what no cluster could give.

    Raises:
        TypeError: If one of them is of the wrong kind.
        ValueError: If a value cannot work.
    """
    if num_workers is not None and (not isinstance(num_workers, int) or isinstance(num_workers, bool)):
        raise TypeError(f"`num_workers` must be an int or None, got {num_workers!r}.")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"`num_workers={num_workers!r}` must be at least 1.")
    amounts = {"num_cpus_per_worker": num_cpus}
    if num_gpus is not None:
        amounts["num_gpus_per_worker"] = num_gpus
    if resources is not None:
        if not isinstance(resources, Mapping):
            raise TypeError(f"`resources_per_worker` must be a dict such as {{'fast': 1}}, got {resources!r}.")
        for name in ("CPU", "GPU"):
            if name in resources:
                raise ValueError(
                    f"`resources_per_worker` names {name!r}: use `num_{name.lower()}s_per_worker` for that."
                )
        amounts.update({f"resources_per_worker[{name!r}]": amount for name, amount in resources.items()})
    for name, amount in amounts.items():
        if not isinstance(amount, (int, float)) or isinstance(amount, bool):
            raise TypeError(f"`{name}` must be a number, got {amount!r}.")
        if not 0 <= amount < math.inf:
            raise ValueError(f"`{name}={amount!r}` must not be negative, nor infinite.")
        if amount > 1 and amount != int(amount):
            raise ValueError(f"`{name}={amount!r}`: Ray gives fractions of one only. Use a whole number.")
    if not num_cpus:
        raise ValueError("`num_cpus_per_worker=0`: a worker computes. Use a fraction to let several share a CPU.")
    if placement not in get_args(PlacementStrategy):
        raise ValueError(f"`placement={placement!r}` must be 'PACK' (few hosts) or 'SPREAD' (many).")


def _resource_text(name: str, amount: float) -> str:
    if name in ("CPU", "GPU"):
        return name if amount == 1 else f"{name}s"
    return f"of {name!r}"

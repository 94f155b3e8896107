"""Runs random cases of new seeds or of one seed, and simplifies cases that fail.

python -m tests.fuzz --seeds 100                    # for each strategy; or: --strategies ddp_ext dp_ext
python -m tests.fuzz --strategy ddp_ext --seed 17   # one case again
"""

import argparse
import random
import signal
import sys
import time
from collections import Counter

from tests.fuzz.cases import STRATEGIES, draw
from tests.fuzz.checking import Pools, check
from tests.fuzz.pool import CASE_LIMIT_S
from tests.fuzz.shrinking import shrink


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--strategies", "--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--seed", type=int, help="run this seed only, or begin with it if --seeds is given")
    parser.add_argument("--seeds", type=int, help="number of seeds per strategy")
    parser.add_argument("--minutes", type=float, help="start no case after this time")
    parser.add_argument("--limit", type=float, default=CASE_LIMIT_S, help="seconds that a case may take")
    parser.add_argument("--no-shrink", action="store_true", help="do not simplify a case that fails")
    parser.add_argument("--verbose", action="store_true", help="print each case")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # kills the ranks
    num_seeds = arguments.seeds or (1 if arguments.seed is not None else 20)
    first = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    print(f"Seeds {first} to {first + num_seeds - 1} of {', '.join(arguments.strategies)}", flush=True)
    deadline = time.monotonic() + 60 * (arguments.minutes or 10**6)
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    with Pools() as pools:
        for seed in range(first, first + num_seeds):
            for strategy in arguments.strategies:
                if time.monotonic() > deadline:
                    continue
                began = time.monotonic()
                result = check(draw(strategy, seed), pools, arguments.limit)
                if arguments.verbose:
                    print(f"{time.monotonic() - began:.1f} s", end=" ")
                counts[strategy, result.kind] += 1
                if arguments.verbose or result.kind == "wrong":
                    print(result, flush=True)
                if result.kind != "wrong":
                    continue
                wrong.append((strategy, seed))
                if not arguments.no_shrink:
                    print(f"Smallest case that fails:\n{shrink(result, pools, arguments.limit)}\n", flush=True)
    for strategy in arguments.strategies:
        print(
            f"{strategy}: " + ", ".join(f"{number} {kind}" for (of, kind), number in counts.items() if of == strategy)
        )
    for strategy, seed in wrong:
        print(f"Reproduce: python -m tests.fuzz --strategy {strategy} --seed {seed}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Features of a model in DDP: the example in CONTRIBUTING.md works in ``fit``."""

import os
import re
from typing import Any

import pytest

from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext.torch_distributed import features
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import REPOSITORY, run_ranks

NUM_STEPS = 3


def messages_of_example(is_in_use: bool) -> list[str]:
    """Returns the example's log of a ``fit`` in which only every second backward pass exchanges gradients."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## Add a feature of DDP\n")[2]
    code = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    line = re.search(r"The line in the table is `(.+?)`", text)
    assert code is not None
    assert line is not None
    messages: list[str] = []
    names: dict[str, Any] = {}
    exec(code[1], names)
    names["rank_zero_info"] = messages.append
    features.FEATURES = (*features.FEATURES, eval(line[1], names))  # type: ignore[misc]
    os.environ["LIGHTNING_STRATEGIES_EXT_LOG_NORMS"] = str(int(is_in_use))
    trainer = make_trainer(DDPStrategy(), max_steps=NUM_STEPS, accumulate_grad_batches=2)
    trainer.fit(MLP(), loader())
    return messages


@pytest.mark.processes
@pytest.mark.parametrize("is_in_use", [True, False])
def test_the_example_of_contributing_is_a_feature(is_in_use: bool) -> None:
    messages, other = run_ranks(messages_of_example, is_in_use)
    assert messages == other  # norms of averaged gradients
    parameters = [name for name, _ in MLP().named_parameters()]
    logged = [message.partition(":")[0] for message in messages]
    assert logged == (parameters * NUM_STEPS if is_in_use else [])

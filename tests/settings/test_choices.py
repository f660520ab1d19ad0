"""Values of flags that stand for something elsewhere are all that is there."""

from typing import get_args, get_type_hints

from deltaserve.control.sched.policy import POLICIES
from deltaserve.settings.config import SchedulingSettings


def test_every_order_of_the_queue_is_a_value_of_its_flag() -> None:
    assert set(get_args(get_type_hints(SchedulingSettings)["schedule_policy"])) == set(POLICIES)

"""What a launch on a GPU may not do."""

import warnings

import torch

from deltaserve.control.sched.plan import StepPlan
from tests.compute.executor.test_launched import LaunchingDriver, prompt_item, rules
from tests.compute.executor.world import random_tokens


def check_launch_waits_for_nothing(driver: LaunchingDriver) -> None:
    """Whatever waits for the device in it raises. The first steps may: they compile kernels and allocate memory."""
    prompt = random_tokens(40, 1)
    driver.open(0, prompt, rules(1, temperature=0.8, top_p=0.9))
    driver.step([prompt_item(0, prompt)])
    for position in (40, 41):
        driver.step([driver.decode(0, position)])
    check_that_waits_for_nothing(driver, driver.planned([driver.decode(0, 42)]))


def check_that_waits_for_nothing(driver: LaunchingDriver, plan: StepPlan) -> None:
    """The plan is launched when all steps before are over, and draws."""
    for launched in driver.launched:
        launched.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        ahead = driver.executor.launch(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ahead.wait().items[0].drawn

"""How weights are computed with, in the words of `--quantization`; model/code_plan.py says what each means."""

from typing import Literal

Quantization = Literal["none", "auto", "int8", "a8"]

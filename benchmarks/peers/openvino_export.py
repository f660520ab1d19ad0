"""A Hugging Face folder in OpenVINO's form, weights as they are. Runs in OpenVINO's environment.

python openvino_export.py MODEL TARGET
"""

import sys

from optimum.intel import OVModelForCausalLM

if __name__ == "__main__":
    source, target = sys.argv[1:]
    OVModelForCausalLM.from_pretrained(source, export=True, compile=False, load_in_8bit=False).save_pretrained(target)

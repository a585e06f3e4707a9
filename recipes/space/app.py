"""The page of `hf-depthroute play` for the adapter that the variable ADAPTER names."""

import os

from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_depthroute.play.page import make_page

adapter = os.environ.get("ADAPTER") or ""
if not adapter:
    raise SystemExit("Set the variable ADAPTER to the Hub id or folder of a depth-routed adapter.")
base = os.environ.get("MODEL") or PeftConfig.from_pretrained(adapter).base_model_name_or_path
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, device_map="auto"), adapter).eval()
demo = make_page(model, AutoTokenizer.from_pretrained(base), adapter)

if __name__ == "__main__":
    demo.launch()

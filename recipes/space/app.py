"""The page of `hf-depthroute play` for the adapter that the variable ADAPTER names."""

import os

from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_depthroute.play.page import make_page

adapter = os.environ.get("ADAPTER") or ""
if not adapter:
    raise SystemExit("Set the variable ADAPTER to the Hub id or folder of a depth-routed adapter.")
base = os.environ.get("MODEL") or PeftConfig.from_pretrained(adapter).base_model_name_or_path
model = AutoModelForCausalLM.from_pretrained(base, device_map="auto", trust_remote_code=False)
tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
demo = make_page(PeftModel.from_pretrained(model, adapter).eval(), tokenizer, adapter)

if __name__ == "__main__":
    demo.launch()
